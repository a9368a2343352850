"""The contents of samples: fingerprints, by which two ranks, or two epochs, are seen to read the same samples.

A part of a sample is one of its tensors, as its image or its label.
"""

import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.doctor.record import Content, Epoch

NUMBERS_OF_A_FINGERPRINT = 1024  # of a part, spread over it
MIN_SAMPLES = 16  # fewer samples may have something in common, or come in one order, by chance
SAME = 0.9  # samples are the same if one of their parts, as the label of an augmented image, agrees so often


def contents_of(batch: Any, count: int) -> list[Content]:
    """For each of `count` samples a fingerprint of each of its tensors: labels stay where images are augmented."""
    parts = batch if isinstance(batch, list | tuple) else []
    are_lists = [isinstance(part, list | tuple) and len(part) == count for part in parts]
    if parts and all(are_lists):  # a list of images of different sizes, and a list of their targets
        samples = zip(*parts, strict=True)
        found = [tuple(map(_fingerprint, tensors_in(sample))) for sample in samples]
        return found if all(found) else []
    columns: list[list[int]] = []
    for tensor in tensors_in(batch):
        count = count or len(tensor)  # in a stream the first tensor counts the samples
        if len(tensor) == count:  # else it is of the batch, and not of its samples
            columns.append([_fingerprint(row) for row in tensor])
    return list(zip(*columns, strict=True))


def _fingerprint(row: Tensor) -> int:
    values = spread(row.resolve_conj(), NUMBERS_OF_A_FINGERPRINT)
    return zlib.crc32(values.view(torch.uint8).numpy().tobytes())


def spread(tensor: Tensor, count: int) -> Tensor:
    """So many numbers of a tensor, from all of its rows and columns: a whole stride could read one column only."""
    values = tensor.detach().reshape(-1)
    places = torch.linspace(0, len(values) - 1, min(len(values), count), dtype=torch.float64, device="cpu")
    return values[places.long()].cpu()


def tensors_in(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        has_rows = batch.dim() > 0 and batch.layout == torch.strided and not batch.is_nested
        if has_rows:
            yield batch
    elif isinstance(batch, list | tuple):  # also a namedtuple with a field `items`
        for part in batch:
            yield from tensors_in(part)
    elif hasattr(batch, "items"):  # a dict, or what a tokenizer returns
        for _, part in batch.items():
            yield from tensors_in(part)


def count_samples(inputs: tuple, keywords: dict | None) -> int:
    """The number of samples that a network is called with: the images of a list, or the rows of the first tensor."""
    if inputs and isinstance(inputs[0], list):
        return len(inputs[0])
    return len(next(tensors_in((inputs, keywords)), ()))


class TwoReads(NamedTuple):
    """The contents of one index in two epochs, and those of the next index that the first epoch has read."""

    first: Content
    second: Content
    first_of_next: Content


def reads_in_both(one: Epoch, other: Epoch) -> list[TwoReads]:
    first = _contents_by_index(one)
    second = _contents_by_index(other)
    indices = [(index, following) for index, following in pairwise(sorted(first)) if index in second]
    return [TwoReads(first[index], second[index], first[following]) for index, following in indices]


def _contents_by_index(epoch: Epoch) -> dict[int, Content]:
    found: dict[int, Content] = {}
    for batch in epoch.batches:
        found.update(zip(batch.indices, batch.contents, strict=False))
    return found


def agreement_by_part(reads: list[TwoReads]) -> dict[int, float]:
    """How often each part of a sample, by its place, is the same in two reads: from 0 to 1, if MIN_SAMPLES reads count.

    Other samples may have the same label by chance. So a read counts only if its part is rare enough to tell:

    first  second  next  where most samples are birds
    bird   bird    dog   does not count: another sample is probably a bird too
    cat    cat     cat   does not count: in a folder that is sorted by label, another rank's files may be cats too
    cat    cat     dog   the same
    cat    dog     dog   not the same
    """
    agreement: dict[int, float] = {}
    parts = min((len(content) for read in reads for content in read), default=0)
    for part in range(parts):
        most_common, _ = Counter(read.first[part] for read in reads).most_common(1)[0]
        telling = [read for read in reads if read.first[part] not in (most_common, read.first_of_next[part])]
        if len(telling) >= MIN_SAMPLES:
            agreement[part] = sum(read.first[part] == read.second[part] for read in telling) / len(telling)
    return agreement
