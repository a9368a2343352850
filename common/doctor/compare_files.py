"""Checks of files: one rank writes each, with the keys of the bare network."""

from pathlib import Path

from common.doctor.answers import Answer, Finding, Unseen
from common.doctor.record import Record


def saves(records: list[Record]) -> Answer:
    writers: dict[str, list[int]] = {}
    for record in records:
        for path, _ in record.saves:
            writers.setdefault(path, []).append(record.rank)
    if not writers:
        return Unseen("no rank called torch.save with a path")
    for path, ranks in sorted(writers.items()):
        if len(set(ranks)) > 1:
            return Finding(
                f"{Path(path).name} is written {len(ranks)} times, by {len(set(ranks))} ranks",
                "let rank 0 write, to another name until the file is complete, and the others wait",
                pitfall="every_rank_saves",
            )
    return None


def keys(records: list[Record]) -> Answer:
    saved = [(path, keys) for record in records for path, keys in record.saves if keys]
    if not saved:
        return Unseen("no state dict went to torch.save")
    if any(model.has_module for record in records for model in record.models):
        return Unseen("a network has a part that is called `module`")
    for path, keys in saved:
        prefixed = sum(key.startswith("module.") for key in keys)
        if prefixed:
            return Finding(
                f"{prefixed} of {len(keys)} in {Path(path).name} begin with `module.`",
                "save `model.module.state_dict()`",
                pitfall="prefixed_keys",
            )
    return None
