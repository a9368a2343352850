"""The script that `test` runs in every process: two small checks with known results."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from .. import Accelerator
from ..utils import DataLoaderConfiguration, GradientAccumulationPlugin
from ..utils.fsdp_utils import whole_parameters

SAMPLES = 46  # divides by no usual global batch: some ranks get less than others


def expect(holds: bool, message: str) -> None:
    """End the process with the verdict `message` unless `holds`."""
    if not holds:
        raise SystemExit(f"FAILED: {message}")


def check_sharding(accelerator: Accelerator) -> None:
    in_order = list(range(SAMPLES))
    loader = DataLoader(TensorDataset(torch.tensor(in_order)), 4 * accelerator.num_processes, shuffle=True)
    visited = []
    for (batch,) in accelerator.prepare(loader):
        samples = accelerator.gather_for_metrics(batch)
        visited.extend(samples.tolist())
    expect(visited != in_order, "the samples came unshuffled")
    expect(sorted(visited) == in_order, "samples were lost or repeated")


def check_training(accelerator: Accelerator) -> None:
    batch_size = 4 * accelerator.num_processes
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(5 * batch_size, 8, dtype=torch.float64, generator=generator)
    classes = torch.randint(3, (5 * batch_size,), generator=generator)
    loader = DataLoader(TensorDataset(points, classes), batch_size)
    alone = train(loader, 0, lambda *objects: objects, torch.Tensor.backward)
    trained = train(loader, accelerator.process_index, accelerator.prepare, accelerator.backward)
    everyone = accelerator.gather(trained[None])
    expect(bool((everyone == trained).all()), "the ranks ended with different weights")
    difference = trained.cpu() - alone
    error = difference.abs().max()
    expect(error.item() < 1e-9, f"the weights are {error:.1e} away from those of one process")


def train(loader: DataLoader, seed: int, prepare: Callable, backward: Callable) -> torch.Tensor:
    """Visit the data once with a small network that starts from `seed`, and return all its weights in one row."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = prepare(model, optimizer, loader)
    for points, classes in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(points), classes)
        backward(loss)
        optimizer.step()
    with whole_parameters(model):
        return nn.utils.parameters_to_vector(model.parameters()).detach()


def main() -> None:
    accelerator = Accelerator(
        mixed_precision="no",
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        # A number of steps would give way to the one that the configuration or the environment sets.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
    )
    check_sharding(accelerator)
    accelerator.print("ok: the shards of a shuffled loader hold every sample, and gathering gives each back once")
    check_training(accelerator)
    accelerator.print("ok: ranks that start from different weights end with the same ones as one process alone")
    kind = accelerator.distributed_type.value
    accelerator.print(f"PASSED: {accelerator.num_processes} × {accelerator.device} ({kind})")
    accelerator.end_training()


if __name__ == "__main__":
    main()
