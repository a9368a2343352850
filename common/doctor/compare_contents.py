"""Contents of samples: whether a number is one sample on all ranks, and whether one sample has two numbers.

A row is what `watch_data` keeps of a sample: a fingerprint for each of its tensors. Augmentation changes some of them
from one read to the next, and the labels of many samples are alike. So not all of them tell samples apart.
"""

from typing import NamedTuple

from common.doctor.record import Pass

ALIKE = 0.9  # of the samples that were read twice, for their contents to be taken for the same
Row = tuple[int, ...]


class Overlap(NamedTuple):
    """Samples of several ranks with equal contents, and how many were compared."""

    shared: int
    compared: int


class Contents:
    """The contents of samples in passes over one DataLoader, each pass with one entry for every rank.

    Attributes:
        known: the samples have tensors.
        read_again: a rank has read a sample twice, so that what changes from one read to the next is known.
        places: the tensors that do not change, as far as is known, and are not the same in all samples.
        same: several ranks have read samples of one number, and these are one sample each.
        other: several ranks have read samples of one number, and these are different samples.
    """

    def __init__(self, passes: list[tuple[Pass, ...]]) -> None:
        ranks = [_rows_by_number(of_rank) for of_rank in zip(*passes, strict=True)]
        reads = [rows for rows_of in ranks for rows in rows_of.values()]  # of one sample by one rank
        widths = {len(row) for rows in reads for row in rows}
        self.known = len(widths) == 1 and widths != {0}
        self.read_again = any(len(rows) > 1 for rows in reads)
        self.places = _steady_places(reads, widths.pop()) if self.known else []
        alike, common = self._alike(ranks)
        self.same = bool(self.places) and common > 0 and alike >= ALIKE * common
        self.other = bool(self.places) and common > 0 and not self.same

    @property
    def compared(self) -> bool:
        """Equal samples would have been noticed."""
        return self.read_again and bool(self.places)

    def overlap(self, bodies: list[dict[int, Row]]) -> Overlap | None:
        """Contents that several ranks have read in one pass; None if they do not tell a rank's samples apart."""
        seen: set[Row] = set()
        shared: set[Row] = set()
        for rows in bodies:
            keys = {self._key(row) for row in rows.values()}
            if not self.places or len(keys) < len(rows):
                return None
            shared |= seen & keys
            seen |= keys
        return Overlap(len(shared), len(seen))

    def _alike(self, ranks: list[dict[int, list[Row]]]) -> tuple[int, int]:
        """How many samples of one number on two ranks are alike, and how many there are."""
        pairs: list[tuple[Row, Row]] = []
        for rows_of in ranks[1:]:
            pairs += [(ranks[0][number][0], rows_of[number][0]) for number in ranks[0].keys() & rows_of.keys()]
        if self.read_again:
            return sum(self._key(mine) == self._key(its) for mine, its in pairs), len(pairs)
        # Any of the tensors may be an augmented one: the steadiest decides, the label for example.
        alike = [sum(mine[place] == its[place] for mine, its in pairs) for place in self.places]
        return max(alike, default=0), len(pairs)

    def _key(self, row: Row) -> Row:
        return tuple(row[place] for place in self.places)


def rows_of_pass(one: Pass, end: int | None = None) -> dict[int, Row]:
    """The contents of the samples before `end`, by number, as far as they were kept."""
    numbers = (one.samples or [])[:end]
    return {number: tuple(row) for number, row in zip(numbers, one.contents, strict=False)}


def _rows_by_number(passes: tuple[Pass, ...]) -> dict[int, list[Row]]:
    rows_of: dict[int, list[Row]] = {}
    for one in passes:
        for number, row in zip(one.samples or [], one.contents, strict=False):
            rows_of.setdefault(number, []).append(tuple(row))
    return rows_of


def _steady_places(reads: list[list[Row]], width: int) -> list[int]:
    places = []
    for place in range(width):
        values_of_samples = [{row[place] for row in rows} for rows in reads]
        again = [values for values, rows in zip(values_of_samples, reads, strict=True) if len(rows) > 1]
        steady = sum(len(values) == 1 for values in again)
        is_of_all = len(set.union(*values_of_samples)) == 1
        if steady >= ALIKE * len(again) and not is_of_all:
            places.append(place)
    return places
