"""Files: one rank writes each file, with the keys of the bare network."""

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.doctor.record import Record, Save
from common.doctor.recorder import Recorder
from common.doctor.results import Finding, Passed, Result, Skipped


def observe_saves(recorder: Recorder) -> None:
    def before_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        path = f if isinstance(f, str | os.PathLike) else getattr(f, "name", None)  # else it is an open file
        if isinstance(path, str | os.PathLike) and not Path(path).is_char_device():  # /dev/null is no file
            recorder.record.saves.append(Save(str(Path(path).resolve()), _state_dicts(obj)))

    recorder.wrap(torch, "save", before=before_save)


def _state_dicts(value: Any) -> list[list[str]]:
    if not isinstance(value, dict):
        return []
    keys = [str(key) for key, part in value.items() if isinstance(part, Tensor)]
    inner = [keys for part in value.values() for keys in _state_dicts(part)]
    return [keys, *inner] if keys else inner


def check_writers(records: list[Record]) -> Result:
    """Passed if one rank writes each file; a Finding if several do."""
    writers: dict[str, list[int]] = defaultdict(list)
    for record in records:
        for save in record.saves:
            writers[save.path].append(record.rank)
    if not writers:
        return Skipped("no main thread called torch.save with a path")
    for path, ranks in sorted(writers.items()):
        if len(set(ranks)) > 1:
            text = f"the file {Path(path).name} is written {len(ranks)} times, by {len(set(ranks))} ranks"
            advice = "let rank 0 write, to another name until the file is complete, and the others wait"
            return Finding(text, advice, pitfall="every_rank_saves")
    return Passed()


def check_keys(records: list[Record]) -> Result:
    """A Finding if DistributedDataParallel's prefix is left in a state dict of a network that it holds; else Passed."""
    saves = [save for record in records for save in record.saves if save.state_dicts]
    if not saves:
        return Skipped("no state dict went to torch.save")
    of_wrapped = [set(network.shapes) for record in records for network in record.networks if network.wrapped]
    for save in saves:
        for saved_keys in save.state_dicts:
            keys = [key.removeprefix("_orig_mod.") for key in saved_keys]  # torch.compile's
            # An AveragedModel, which keeps a moving average, has the keys `n_averaged` and `module.…`.
            prefix = "module.module." if "n_averaged" in keys else "module."
            prefixed = {key.removeprefix(prefix).removeprefix("_orig_mod.") for key in keys if key.startswith(prefix)}
            if any(wrapped and wrapped <= prefixed for wrapped in of_wrapped):
                text = f"{len(prefixed)} of {len(keys)} keys in {Path(save.path).name} begin with `{prefix}`"
                advice = "save and average `model.module`; an average of your own may have such keys"
                return Finding(text, advice, pitfall="prefixed_keys")
    return Passed()
