"""Operations on nested structures in one process: what accelerate's give, and what comes where those fail."""

import collections
import os

import numpy
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from common.accelerator import operations
from common.accelerator.utils import send_to_device
from tests.unit.accelerator.plain import Point, plain


class Records(dict):
    """A mapping of the script's own."""


class Encoding(collections.UserDict):
    """A mapping that is no dict, as a tokenizer's BatchEncoding."""


class Items(list):
    """A list of the script's own."""


def answer(function, *args, **kwargs):
    try:
        return plain(function(*args, **kwargs))
    except Exception as error:
        return type(error).__name__


STRUCTURES = [
    torch.arange(6).view(3, 2),
    torch.tensor(1.5),
    [torch.ones(2), (torch.zeros(2, dtype=torch.bfloat16), "text")],
    Records(a=torch.ones(1, 2), b=None),
    Point(torch.arange(2), [torch.ones(2, dtype=torch.float16)]),
    Encoding(ids=torch.arange(3), more=Items([torch.ones(3), Encoding()])),
    Items([Encoding(ids=torch.ones(1)), 1, Point("text", None)]),
    {"first": "text", "second": torch.ones(2)},
    [],
    {},
    "text",
    None,
]


FUNCTIONS = ["listify", "convert_to_fp32", "find_batch_size", "is_torch_tensor", "is_namedtuple"]
COLLECTIVES = ["gather", "gather_object", "broadcast", "reduce", "pad_across_processes"]


@pytest.mark.parametrize("name", FUNCTIONS + COLLECTIVES)
def test_each_operation_of_one_process_gives_what_accelerates_gives(name, utils_of_both):
    ours, theirs = (getattr(library.operations, name) for library in utils_of_both)
    for structure in STRUCTURES:
        assert answer(ours, structure) == answer(theirs, structure), structure


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("send_to_device", [Encoding(x=Items([torch.ones(1)]), stays=1), "cpu"], {"skip_keys": ["x"]}),
        ("recursively_apply", [torch.neg, ["text"]], {"error_on_other_type": True}),
        ("recursively_apply", [torch.neg, {"x": (torch.ones(1), "text")}], {}),
        ("concatenate", [[{"x": (torch.ones(1, 2), torch.zeros(1, 3))}] * 2], {"dim": 1}),
        ("concatenate", [["a", "b"]], {}),
    ],
)
def test_structures_are_mapped_as_in_accelerate(name, args, kwargs, utils_of_both):
    ours, theirs = (getattr(library.operations, name) for library in utils_of_both)
    assert answer(ours, *args, **kwargs) == answer(theirs, *args, **kwargs)


def of_its_own(base):
    """A container whose constructor takes a name and no content."""

    class OfItsOwn(base):
        def __init__(self, name):
            super().__init__()
            self.name = name

    return OfItsOwn("a name")


class Pair(Point):
    """A namedtuple whose constructor takes one argument for two fields."""

    def __new__(cls, x):
        return super().__new__(cls, x, x)


@pytest.mark.parametrize(
    "apply, factor",
    [(lambda data: send_to_device(data, "cpu"), 1), (lambda data: operations.recursively_apply(torch.neg, data), -1)],
    ids=["send_to_device", "recursively_apply"],
)
def test_containers_whose_constructors_take_something_else_keep_class_content_and_attributes(apply, factor):
    """On accelerate they raise, or arrive empty."""
    counts = apply(collections.defaultdict(list, a=torch.ones(1), b=collections.defaultdict(int)))
    assert counts["a"].item() == factor
    assert counts.default_factory is list and counts["b"].default_factory is int
    for base in (dict, collections.UserDict):
        own = of_its_own(base)
        own["a"] = torch.ones(1)
        applied = apply(own)
        assert (type(applied), applied.name, applied["a"].item()) == (type(own), "a name", factor)
        assert own["a"].item() == 1, "the script's own is as it was"
    own = of_its_own(list)
    own.append(torch.ones(1))
    applied = apply(own)
    assert (type(applied), applied.name, applied[0].item()) == (type(own), "a name", factor)
    pair = apply(Pair(torch.ones(1)))
    assert (type(pair), pair.x.item(), pair.y.item()) == (Pair, factor, factor)
    assert type(apply(torch.Size([2, 3]))) is torch.Size


def test_a_container_that_cannot_be_made_again_is_named():
    with pytest.raises(TypeError, match="a _Environ cannot be made of a dict with its items"):
        send_to_device(os.environ, "cpu")


def test_a_packed_sequence_goes_to_the_device_whole_and_what_has_a_method_to_by_that():
    class Batch(dict):
        def to(self, device):
            return f"moved to {device}"

    packed = pack_sequence([torch.ones(3), torch.zeros(2)])
    data = {"packed": packed, "stays": torch.ones(1), "own": [Batch(), Point(1, "text")]}
    moved = send_to_device(data, "meta", skip_keys="stays")
    assert isinstance(moved["packed"], PackedSequence) and moved["packed"].data.device.type == "meta"
    assert moved["packed"].batch_sizes.tolist() == [2, 2, 1]
    assert moved["stays"].device.type == "cpu"
    assert moved["own"] == ["moved to meta", Point(1, "text")]


def test_a_converted_forward_leads_back_to_the_models_own(utils_of_both):
    def forward(x):
        return {"y": x.bfloat16(), "n": numpy.float16(1)}

    for library in utils_of_both:
        converted = library.convert_outputs_to_fp32(forward)
        output = converted(torch.ones(1))
        assert output["y"].dtype == torch.float32 and isinstance(output["n"], numpy.float16)
        assert isinstance(converted.__wrapped__, library.operations.ConvertOutputsToFp32)
        assert converted.__wrapped__.model_forward is converted.__wrapped__.__wrapped__ is forward
