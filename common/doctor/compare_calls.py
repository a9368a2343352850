"""Checks of single calls: collectives are made by all ranks, and files are written by one."""

from itertools import zip_longest
from pathlib import Path

from common.doctor.answers import Answer, Finding, Healthy, Unseen
from common.doctor.record import Record


def collectives(records: list[Record]) -> Answer:
    number = max(len(record.collectives) for record in records)
    if not number:
        return Unseen("the script itself calls none")
    if any(record.ended != "whole" for record in records):
        return Unseen("a rank did not reach the end of the script")
    return different_collective(records) or Healthy(f"{number}, the same on all ranks")


def different_collective(records: list[Record], lines: bool = False) -> Finding | None:
    """The first collective in which the ranks differ: in its kind, or where `lines`, in the line that calls it."""
    for number, calls in enumerate(zip_longest(*(record.collectives for record in records)), 1):
        compared = set(calls)
        if not lines:
            compared = {call and call[0] for call in calls}
        if len(compared) == 1:
            continue
        ranks = [f"rank {rank} {' in '.join(call or ['none'])}" for rank, call in enumerate(calls)]
        only_on_rank_0 = calls[0] is not None and calls[0] not in calls[1:]
        return Finding(
            f"collective {number} of the script: {', '.join(ranks)}",
            "let all ranks call it, and rank 0 print",
            pitfall="collective_on_rank_0" if only_on_rank_0 else None,
            why=None if only_on_rank_0 else "Each collective waits for all ranks, or takes another one for it.",
        )
    return None


def saves(records: list[Record]) -> Answer:
    writers: dict[str, list[int]] = {}
    for record in records:
        for path, _ in record.saves:
            writers.setdefault(path, []).append(record.rank)
    writers.pop("/dev/null", None)
    if not writers:
        return Unseen("no rank called torch.save with a path")
    for path, ranks in sorted(writers.items()):
        if len(set(ranks)) > 1:
            return Finding(
                f"{Path(path).name} is written {len(ranks)} times, by {len(set(ranks))} ranks",
                "let rank 0 write, to another name until the file is complete, and the others wait",
                pitfall="every_rank_saves",
            )
    return Healthy(f"{len(writers)}, each written by one rank")


def keys(records: list[Record]) -> Answer:
    saved = [(path, keys) for record in records for path, keys in record.saves if keys]
    if not saved:
        return Unseen("no state dict went to torch.save")
    own = any(model.has_module for record in records for model in record.models)
    for path, keys in saved:
        prefixed = sum(key.startswith("module.") for key in keys)
        if prefixed and not own:
            return Finding(
                f"{prefixed} of {len(keys)} in {Path(path).name} begin with `module.`",
                "save `model.module.state_dict()`",
                pitfall="prefixed_keys",
            )
    return Healthy("as the network has them")
