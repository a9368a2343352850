"""`gather_for_metrics`: each real sample once, how often the ranks meet for it, and what comes where results differ."""

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, DistributedSampler

from common.accelerator.data_loader import DataLoaderShard
from common.accelerator.utils import DataLoaderConfiguration, listify
from common.nested import NamedLeaf, leaves
from tests.toys import StreamOfWorkers
from tests.unit.accelerator.several_processes import on_ranks

DTYPES = (torch.bool, torch.int16, torch.int64, torch.bfloat16, torch.float16, torch.float64, torch.complex64)
UNEVEN = DataLoaderConfiguration(even_batches=False)


class Collectives(TorchDispatchMode):
    """Counts the collectives that this process takes part in; each passes the dispatcher as an operation of c10d."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def results_of(numbers):
    columns = {str(dtype): (numbers % 3).to(dtype) for dtype in DTYPES}
    wide = numbers[:, None, None] + torch.arange(6).view(3, 2) / 8
    nothing = torch.empty(len(numbers), 0)
    return {"columns": columns, "rest": (wide, [nothing, wide.transpose(1, 2)]), "number": numbers}


def gather_steps(accelerator, n):
    """The collectives and the numbers of each step, after a look whether all that was gathered belongs to them."""
    steps = {"collectives": [], "numbers": []}
    for numbers in accelerator.prepare(DataLoader(torch.arange(n), batch_size=4)):
        with Collectives() as counter:
            gathered = accelerator.gather_for_metrics(results_of(numbers))
        assert all(map(torch.equal, leaves(gathered), leaves(results_of(gathered["number"]))))
        steps["collectives"].append(counter.count)
        steps["numbers"].append(gathered["number"].tolist())
    return steps


def test_every_step_of_any_structure_takes_one_collective():
    for steps in on_ranks(3, gather_steps, 13):
        assert steps == {"collectives": [1, 1], "numbers": [list(range(12)), [12]]}


def test_a_step_that_is_not_filled_up_is_gathered_too():
    for steps in on_ranks(3, gather_steps, 11, dataloader_config=UNEVEN):
        assert steps["numbers"] == [list(range(11))]


def gather_texts(accelerator, n, batch_size):
    texts = []
    numbers = []
    for batch in accelerator.prepare(DataLoader(torch.arange(n), batch_size=batch_size)):
        texts += accelerator.gather_for_metrics([f"sample {i}" for i in batch.tolist()])
        structure = accelerator.gather_for_metrics({"pair": (batch, batch.tolist()), "file": "abc"})
        assert "abc" in structure["file"]  # whole: a text on one process, a list of texts on several
        numbers += zip(structure["pair"][0].tolist(), structure["pair"][1], strict=True)
    return {"texts": texts, "numbers": numbers}


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(("n", "batch_size"), [(11, 2), (1, 4), (5, 1), (8, 2)])
def test_gather_for_metrics_returns_each_real_sample_once_on_every_process(n, batch_size, world):
    # https://github.com/huggingface/accelerate/issues/1674
    for gathered in on_ranks(world, gather_texts, n, batch_size):
        assert gathered["texts"] == [f"sample {i}" for i in range(n)]
        assert gathered["numbers"] == [(i, i) for i in range(n)]


def gather_padded_batches(accelerator):
    loader = DataLoader(torch.arange(8), batch_sampler=[[0], [1, 2, 3], [4, 5], [6, 7]])
    gathered = []
    for batch in accelerator.prepare(loader):
        padded = accelerator.pad_across_processes(batch, pad_index=-1)
        gathered.append(accelerator.gather_for_metrics(padded.repeat_interleave(2)).tolist())
    return gathered


def test_batches_of_any_size_that_repeat_nothing_are_gathered_whole():
    for first, last in on_ranks(2, gather_padded_batches):
        assert first == [0, 0, -1, -1, -1, -1, 1, 1, 2, 2, 3, 3] and last == [4, 4, 5, 5, 6, 6, 7, 7]


def gather_pairs_in_one_process(accelerator):
    for batch in accelerator.prepare(DataLoader(torch.arange(6).view(3, 2), batch_size=2)):
        loss, pairs = accelerator.gather_for_metrics((torch.tensor(0.5), batch.flatten()))
        assert loss == 0.5 and torch.equal(pairs, batch.flatten())


def test_nothing_is_cut_beside_a_scalar():
    on_ranks(1, gather_pairs_in_one_process)


def gather_parts_of_a_stream(accelerator):
    loader = DataLoader(StreamOfWorkers(range(10)), batch_size=2, num_workers=2, multiprocessing_context="fork")
    return [accelerator.gather_for_metrics(batch).tolist() for batch in accelerator.prepare(loader)]


def test_the_last_step_of_each_loader_worker_is_cut_too():
    config = DataLoaderConfiguration(dispatch_batches=False)
    for steps in on_ranks(2, gather_parts_of_a_stream, dataloader_config=config):
        assert steps == [[0, 2, 4, 6], [1, 3, 5, 7], [8], [9]]


def gather_what_has_no_rows(accelerator):
    rank = accelerator.process_index
    gathered = {
        "beside none": accelerator.gather_for_metrics({"logits": torch.ones(1), "past": None}),
        "beside a number": accelerator.gather_for_metrics([torch.ones(1), 2.5]),
        "number": accelerator.gather_for_metrics(5 + rank),
        "of numpy": accelerator.gather_for_metrics({"correct": numpy.int64(rank), "best": numpy.bool_(True)}),
        "named": accelerator.gather_for_metrics(NamedLeaf("f1", 0.5)),
        "losses": [],
    }
    for sample in accelerator.prepare(DataLoader([torch.ones(2)] * 3, batch_size=1)):
        gathered["losses"].append(accelerator.gather_for_metrics(sample.mean()))
    return listify(gathered)


def test_none_numbers_and_losses_are_gathered_too():
    for gathered in on_ranks(2, gather_what_has_no_rows):
        assert gathered == {
            "beside none": {"logits": [1.0, 1.0], "past": [None, None]},
            "beside a number": [[1.0, 1.0], [2.5, 2.5]],
            "number": [5, 6],
            "of numpy": {"correct": [0, 1], "best": [True, True]},
            "named": NamedLeaf(["f1", "f1"], [0.5, 0.5]),
            "losses": [[1.0, 1.0], [1.0]],  # three samples
        }


def gather_what_differs(accelerator):
    """The messages about results whose shapes differ between the ranks, although their bytes are equally many."""
    messages = []
    rank = accelerator.process_index
    for batch in accelerator.prepare(DataLoader(range(5), batch_size=2)):
        columns = [torch.ones(2, 3 + rank), torch.ones(2, 4 - rank)]
        try:
            accelerator.gather_for_metrics(columns if len(batch) == 2 else batch)
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def test_gathering_where_a_process_has_no_batch_is_an_error_not_a_hang():
    (differs, lacks), (differs_too,) = on_ranks(2, gather_what_differs, dataloader_config=UNEVEN)
    assert differs == differs_too and "rank 1: [0] [2, 4] torch.float32; [1] [2, 3] torch.float32" in differs
    assert "only ranks 0 to 0 have a batch" in lacks


def gather_from_a_loader_of_its_own(accelerator):
    sampler = DistributedSampler(range(10), shuffle=False)
    batches = DataLoaderShard(range(10), batch_size=4, sampler=sampler)
    return [accelerator.gather_for_metrics(batch).tolist() for batch in batches]


def test_batches_of_a_loader_that_the_script_has_made_are_gathered():
    assert on_ranks(2, gather_from_a_loader_of_its_own) == [[[0, 2, 4, 6, 1, 3, 5, 7], [8, 9]]] * 2


def gather_losses(accelerator):
    """In a step of two samples on rank 0 and one on rank 1: a loss, one for each row of a whole batch, and rows."""
    for batch in accelerator.prepare(DataLoader(range(3), batch_size=2)):
        loss = batch.float().mean()
        gathered = accelerator.gather_for_metrics({"loss": loss, "repeated": loss.repeat(2), "rows": batch})
    return listify(gathered)


def test_a_loss_repeated_for_a_whole_batch_is_no_batch_where_some_rank_has_fewer_rows():
    for gathered in on_ranks(2, gather_losses, dataloader_config=UNEVEN):
        # As in the original: of what is no batch, as many entries as there are samples.
        assert gathered == {"loss": [0.5, 2.0], "repeated": [0.5, 0.5, 2.0], "rows": [0, 1, 2]}
