"""Files: the keys of the state dicts that go into each by `torch.save`."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.doctor.observers.recorder import Recorder
from common.doctor.record import Save


def install(recorder: Recorder) -> None:
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
