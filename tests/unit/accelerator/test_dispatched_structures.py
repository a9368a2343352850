"""Batches of any structure that the main process alone reads, and hands out."""

import collections
import re
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from common.accelerator.utils import recursively_apply
from tests.unit.accelerator.several_processes import on_dispatching_ranks

FIRST, SECOND = torch.arange(8).split(4)  # The rows of the two batches of a step.


def dispatch_texts(accelerator):
    records = [{"text": letter, "pair": (letter, number)} for number, letter in enumerate("abcde")]
    texts = {"own": [], "gathered": [], "gathered numbers": []}
    for batch in accelerator.prepare(DataLoader(records, batch_size=2)):
        gathered = accelerator.gather_for_metrics(batch)
        texts["own"].append(batch["text"])
        texts["gathered"].append(gathered["text"])
        texts["gathered numbers"].append(gathered["pair"][1].tolist())
    return texts


def test_texts_are_sharded_like_rows():
    one, two = on_dispatching_ranks(2, dispatch_texts)
    assert one.pop("own") == [["a", "b"], ["e"]]
    assert two.pop("own") == [["c", "d"], ["a"]]
    assert one == two == {"gathered": [list("abcd"), ["e"]], "gathered numbers": [[0, 1, 2, 3], [4]]}


def as_channels_last(images):
    return torch.stack(images).to(memory_format=torch.channels_last)


def dispatch_images(accelerator):
    loader = DataLoader(torch.arange(96).view(4, 3, 2, 4), batch_size=2, collate_fn=as_channels_last)
    return [batch.tolist() for batch in accelerator.prepare(loader)]


def test_batches_keep_their_numbers_whatever_their_strides():
    images = torch.arange(96).view(4, 3, 2, 4).tolist()
    assert on_dispatching_ranks(2, dispatch_images) == [[images[:2]], [images[2:]]]


Tagged = collections.namedtuple("Tagged", "tag rows")


def batches_to_keep(rows):
    """Batches in which some entries have no row for each sample, by what is special. These entries stay as they are."""
    return {
        "flag": {"flag": True, "rows": rows},
        "text": {"name": "ab", "rows": rows},
        "number": {"scale": torch.tensor(0.5), "of numpy": numpy.float32(2), "rows": rows},
        "none": (None, rows),
        "empty": {"empty": [], "also": {}, "rows": rows},
        "tuple": (("a", "b", "c"), rows),
        "namedtuple": Tagged("tag", rows),
        "arrays": {"array": rows.numpy(), "in a list": [rows.numpy()], "rows": rows},
        "array alone": (rows.numpy(), "train"),
        "lists": {"spans": [[row] * 4 for row in rows.tolist()], "rows": rows},
        "entries": [{"row": row} for row in rows.tolist()],
        "defaultdict": collections.defaultdict(list, rows=rows),
    }


class Refused(NamedTuple):
    """The two batches of a step that cannot be divided among the ranks, or not be joined, and the error."""

    message: str
    first_batch: Any
    second_batch: Any


REFUSED = [
    Refused("batch['weights']: 3, batch['rows']: 4", *[{"weights": torch.ones(3), "rows": FIRST}] * 2),
    Refused("batch['names']: 3, batch['texts']: 4", *[{"names": list("abc"), "texts": list("abcd")}] * 2),
    Refused("may be samples or columns", *[[tuple("abcd"), tuple("ABCD")]] * 2),
    Refused("the lists in batch['pair'] may be samples or columns", *[{"rows": FIRST, "pair": [list("abcd")] * 4}] * 2),
    Refused("batch['turns'] may be samples or columns", *[{"rows": FIRST, "turns": [{"text": list("abcd")}] * 4}] * 2),
    Refused("batch['words'] may be samples or columns", *[{"rows": FIRST, "words": [tuple("abcd")] * 3}] * 2),
    Refused("nothing in the batch has a row", *[{"flag": True, "loss": torch.tensor(0.5)}] * 2),
    Refused("batch['first'] differs between the batches", {"first": 0, "rows": FIRST}, {"first": 4, "rows": SECOND}),
    Refused("batch['slice'] differs", {"slice": slice(FIRST), "rows": FIRST}, {"slice": slice(SECOND), "rows": SECOND}),
    Refused("only some of the batches of a step have batch['more']", {"rows": FIRST, "more": FIRST}, {"rows": SECOND}),
    Refused("batch['rows'] cannot be joined to a step", {"rows": torch.ones(4, 1)}, {"rows": torch.ones(4, 5)}),
    Refused("batch cannot be joined to a step (Sizes of", torch.ones(4, 1), torch.ones(4, 5)),
    Refused("batch['mixed'] cannot be joined", {"mixed": FIRST, "rows": FIRST}, {"mixed": [4] * 4, "rows": SECOND}),
]


def dispatch(accelerator, *batches):
    (part,) = accelerator.prepare(DataLoader(batches, batch_size=1, collate_fn=lambda samples: samples[0]))
    return part


def as_lists(batch):
    return recursively_apply(lambda leaf: leaf.tolist(), batch, test_type=lambda leaf: hasattr(leaf, "tolist"))


def assert_all_are_kept(accelerator):
    first, second = batches_to_keep(FIRST), batches_to_keep(SECOND)
    for kind, expected in (first if accelerator.is_main_process else second).items():
        found = dispatch(accelerator, first[kind], second[kind])
        assert as_lists(found) == as_lists(expected), kind
        assert type(found) is type(expected)


def test_an_entry_without_a_row_for_each_sample_arrives_as_it_is():
    on_dispatching_ranks(2, assert_all_are_kept)


def assert_all_are_refused(accelerator):
    for refused in REFUSED:
        with pytest.raises(Exception, match=rf"{re.escape(refused.message)}(?s:.*)dispatch_batches=False"):
            dispatch(accelerator, refused.first_batch, refused.second_batch)


def test_a_batch_that_cannot_be_divided_is_refused_by_name_on_all_ranks():
    on_dispatching_ranks(2, assert_all_are_refused)


@pytest.mark.parametrize("batch", [{"pad": torch.ones(1), "x": torch.ones(4, 3)}, {"n": 2}, [("a", "b"), ("A", "B")]])
def test_the_only_process_gets_its_batches_whole(batch):
    def dispatched(accelerator):
        loader = accelerator.prepare(DataLoader(range(4), batch_size=4, collate_fn=lambda samples: batch))
        return [(as_lists(found), loader.short_step) for found in loader]

    assert on_dispatching_ranks(1, dispatched) == [[(as_lists(batch), None)]]
