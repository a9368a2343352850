"""Accumulate at level 02: several micro-batches for one step, and one all-reduce.

You have a model in DistributedDataParallel, an optimizer, and a list of micro-batches of equal size, each an (images,
targets) pair. Write

    def train_step(model, optimizer, micro_batches) -> None: ...

It takes one optimizer step with the mean gradient over all samples of all micro-batches and ranks. The loss of a
micro-batch is `torch.nn.functional.nll_loss(model(images), targets)`. Gradients travel between the ranks once, however
many micro-batches there are, and the next step begins without old gradients.
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.ladder.exercises.stage import SolutionFailed, function_in, on_ranks, process_group

MICRO_BATCHES = 3
MICRO_BATCH_SIZE = 4
STEPS = 2


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3), nn.LogSoftmax(dim=1)).double()


def samples(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All samples of a step, of both ranks."""
    generator = torch.Generator().manual_seed(step)
    count = 2 * MICRO_BATCHES * MICRO_BATCH_SIZE
    images = torch.randn(count, 5, generator=generator).double()
    return images, torch.randint(3, (count,), generator=generator)


def run(path: str) -> dict:
    """On one rank: the final weights, and how often gradients were sent in each step."""
    solution = function_in(path, "train_step")
    with process_group():
        model = DistributedDataParallel(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sent = 0

        def count_and_average(_, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            nonlocal sent
            sent += 1
            message = bucket.buffer() / dist.get_world_size()
            work = dist.all_reduce(message, async_op=True)
            return work.get_future().then(lambda future: future.value()[0])

        model.register_comm_hook(None, count_and_average)
        times_sent = []
        for step in range(STEPS):
            sent = 0
            images, targets = (part[dist.get_rank() :: 2] for part in samples(step))
            micro_batches = list(zip(images.split(MICRO_BATCH_SIZE), targets.split(MICRO_BATCH_SIZE), strict=True))
            solution(model, optimizer, micro_batches)
            times_sent.append(sent)
        weights = {name: value.clone() for name, value in model.module.state_dict().items()}
        return {"weights": weights, "times_sent": times_sent}


def expected() -> dict[str, torch.Tensor]:
    """The weights that one device trains with all samples of a step in one batch."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        images, targets = samples(step)
        F.nll_loss(model(images), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def check(path: Path) -> list[str]:
    """Two steps on two ranks, with three micro-batches each."""
    try:
        results = on_ranks(2, run, path)
    except SolutionFailed as failure:
        return [str(failure)]
    found = []
    times_sent = results[0]["times_sent"]
    if any(times == 0 for times in times_sent):
        found.append("in some step no gradient was sent: the last micro-batch must be outside no_sync()")
    elif any(times > 1 for times in times_sent):
        most = max(times_sent)
        found.append(f"gradients were sent {most} times in a step: the first micro-batches belong into no_sync()")
    weights = expected()
    for rank, result in enumerate(results):
        if not all(torch.allclose(result["weights"][name], weights[name]) for name in weights):
            found.append(f"the weights on rank {rank} are not those of one device with all samples in one batch")
    return found
