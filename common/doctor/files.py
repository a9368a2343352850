"""Files: one rank writes each, with the keys of the bare network."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.doctor.answers import Answer, Finding, NotExamined, Right
from common.doctor.record import Record, Save
from common.doctor.recorder import Recorder


def watch(recorder: Recorder) -> None:
    def note_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        path = getattr(f, "name", f)  # of an open file, or itself
        if isinstance(path, str | os.PathLike):
            keys = [str(key) for state in _state_dicts(obj) for key in state]
            recorder.record.saves.append(Save(str(Path(path).resolve()), keys))

    recorder.watch(torch, "save", before=note_save)


def _state_dicts(value: Any) -> Iterator[dict[str, Tensor]]:
    if not isinstance(value, dict) or not value:
        return
    if all(isinstance(part, Tensor) for part in value.values()):
        yield value
        return
    for part in value.values():
        yield from _state_dicts(part)


def check_writers(records: list[Record]) -> Answer:
    ranks_of: dict[str, list[int]] = {}
    for record in records:
        for save in record.saves:
            ranks_of.setdefault(save.path, []).append(record.rank)
    if not ranks_of:
        return NotExamined("no rank called torch.save with a path")
    for path, ranks in sorted(ranks_of.items()):
        if len(set(ranks)) > 1:
            return Finding(
                f"the file {Path(path).name} is written {len(ranks)} times, by {len(set(ranks))} ranks",
                "let rank 0 write, to another name until the file is complete, and the others wait",
                pitfall="every_rank_saves",
            )
    return Right()


def check_keys(records: list[Record]) -> Answer:
    with_keys = [save for record in records for save in record.saves if save.keys]
    if not with_keys:
        return NotExamined("no state dict went to torch.save")
    if any(network.has_module for record in records for network in record.networks):
        return NotExamined("a network has a part that is called `module`")
    for save in with_keys:
        prefixed = sum(key.startswith("module.") for key in save.keys)
        if prefixed:
            return Finding(
                f"{prefixed} of {len(save.keys)} keys in {Path(save.path).name} begin with `module.`",
                "save `model.module.state_dict()`",
                pitfall="prefixed_keys",
            )
    return Right()
