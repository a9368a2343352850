"""What `test` runs in every process: three small jobs whose outcome is known in advance."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from .. import Accelerator
from ..utils import DataLoaderConfiguration

SAMPLES = 46  # divides by no usual global batch: some ranks get less than others


def expect(holds: bool, message: str) -> None:
    if not holds:
        raise SystemExit(f"FAILED: {message}")


def check_ranks(accelerator: Accelerator) -> None:
    """every process is there once, and they add up"""
    rank, ranks = torch.tensor([accelerator.process_index], device=accelerator.device), range(accelerator.num_processes)
    expect(accelerator.gather(rank).tolist() == list(ranks), "gather lost or moved a rank")
    expect(accelerator.reduce(rank, "sum").item() == sum(ranks), "the sum over the ranks is wrong")


def check_sharding(accelerator: Accelerator) -> None:
    """the shards of a shuffled loader hold every sample, and gathering gives each back once"""
    data = TensorDataset(torch.arange(SAMPLES))
    loader = accelerator.prepare(DataLoader(data, 4 * accelerator.num_processes, shuffle=True))
    order = [int(sample) for (batch,) in loader for sample in accelerator.gather_for_metrics(batch)]
    expect(order != list(range(SAMPLES)), "the samples came unshuffled")
    expect(sorted(order) == list(range(SAMPLES)), "samples were lost or repeated")


def check_training(accelerator: Accelerator) -> None:
    """ranks that start from different weights end with the same ones, those that one process alone trains"""
    batch = 4 * accelerator.num_processes
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(5 * batch, 8, dtype=torch.float64), torch.randint(3, (5 * batch,)))

    def train(seed: int, prepare, backward) -> torch.Tensor:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()
        model, optimizer, loader = prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), DataLoader(data, batch))
        for inputs, targets in loader:
            optimizer.zero_grad()
            backward(F.cross_entropy(model(inputs), targets))
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    alone = train(0, lambda *objects: objects, torch.Tensor.backward)
    together = train(accelerator.process_index, accelerator.prepare, accelerator.backward)
    everyone = accelerator.gather(together[None])
    expect(bool((everyone == together).all()), "the ranks ended with different weights")
    error = (together.cpu() - alone).abs().max().item()
    expect(error < 1e-9, f"the weights are {error:.1e} away from those of one process")


def main() -> None:
    accelerator = Accelerator(mixed_precision="no", dataloader_config=DataLoaderConfiguration(split_batches=True))
    for check in (check_ranks, check_sharding, check_training):
        check(accelerator)
        accelerator.print(f"ok: {check.__doc__}")
    accelerator.wait_for_everyone()
    processes = f"{accelerator.num_processes} process{'es' * (accelerator.num_processes > 1)}"
    accelerator.print(f"PASSED: {processes} ({accelerator.distributed_type}), device {accelerator.device}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
