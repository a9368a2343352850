"""`gather_for_metrics` in one collective: how often the ranks meet, and what comes where their results differ."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from common.accelerator import Accelerator
from common.accelerator.utils import DataLoaderConfiguration
from common.nested import leaves
from common.processes import ranks

DTYPES = (torch.bool, torch.int16, torch.int64, torch.bfloat16, torch.float16, torch.float64, torch.complex64)


class Collectives(TorchDispatchMode):
    """Counts the collectives that this process takes part in; each passes the dispatcher as an operation of c10d."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def results_of(numbers):
    """Tensors of many dtypes and shapes, with a row for each sample."""
    columns = {str(dtype): (numbers % 3).to(dtype) for dtype in DTYPES}
    wide = numbers[:, None, None].expand(-1, 3, 2) * 0.5
    nothing = torch.empty(len(numbers), 0)
    return {"columns": columns, "rest": (wide, [nothing, wide.transpose(1, 2)]), "number": numbers}


def gather_steps(n, batch_size, kind):
    """Of each step: its collectives, the sample numbers, and whether all that was gathered belongs to them."""
    config = DataLoaderConfiguration(even_batches=kind != "uneven")
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(torch.arange(n), batch_size=batch_size))
    steps = []
    for numbers in loader:
        with Collectives() as counter:
            gathered = accelerator.gather_for_metrics(results_of(numbers))
        expected = results_of(gathered["number"])
        is_equal = all(map(torch.equal, leaves(gathered), leaves(expected)))
        steps.append((counter.count, gathered["number"].tolist(), is_equal))
    accelerator.end_training()
    return steps


@pytest.mark.parametrize(
    ("kind", "n", "expected"),
    [
        ("even", 13, [list(range(12)), [12]]),
        ("uneven", 11, [list(range(11))]),
    ],
)
def test_every_step_of_any_structure_takes_one_collective(kind, n, expected):
    for steps in ranks(3).run(gather_steps, n, 4, kind):
        assert [count for count, _, _ in steps] == [1] * len(expected)
        assert [numbers for _, numbers, _ in steps] == expected
        assert all(is_equal for _, _, is_equal in steps)


def gather_what_differs():
    """The messages about results whose shapes differ between the ranks, although their bytes are equally many."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False), cpu=True)
    rank = accelerator.process_index
    messages = []
    for number, batch in enumerate(accelerator.prepare(DataLoader(range(7), batch_size=2))):
        columns = [torch.ones(2, 3 + rank), torch.ones(2, 4 - rank)]
        if number == 1:  # the ranks have two samples and one
            columns = [torch.ones(len(batch)), torch.ones(3 - len(batch))]
        try:
            accelerator.gather_for_metrics(columns)
        except RuntimeError as error:
            messages.append(str(error))
    repeated = accelerator.gather_for_metrics([torch.ones(2), torch.ones(())])
    accelerator.end_training()
    return messages, [each.tolist() for each in repeated]


def test_results_that_differ_between_ranks_are_an_error_on_all_of_them():
    one, two = ranks(2).run(gather_what_differs)
    for messages, repeated in (one, two):
        assert len(messages) == 2
        assert "different shapes or dtypes" in messages[0] and "different shapes: [1, 2] rows" in messages[1]
        assert repeated == [[1.0] * 4, [1.0] * 2]


def gather_losses():
    """In a step of two samples on rank 0 and one on rank 1: a loss, one for each row of a whole batch, and rows."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False), cpu=True)
    found = []
    for batch in accelerator.prepare(DataLoader(range(3), batch_size=2)):
        loss = batch.float().mean()
        found = accelerator.gather_for_metrics((loss, loss.repeat(2), batch))
    accelerator.end_training()
    return [each.tolist() for each in found]


def test_a_loss_repeated_for_a_whole_batch_is_no_batch_where_some_rank_has_fewer_rows():
    for loss, repeated, rows in ranks(2).run(gather_losses):
        # As in the original: of what is no batch, as many entries as there are samples.
        assert (loss, repeated, rows) == ([0.5, 2.0], [0.5, 0.5, 2.0], [0, 1, 2])
