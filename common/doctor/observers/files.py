"""Files: the keys that go into each by `torch.save`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.doctor.observers.recorder import Recorder
from common.doctor.record import Save


class FileObserver:
    """The files that a script saves."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def install(self) -> None:
        self._recorder.wrap(torch, "save", before=self.before_save)

    def before_save(self, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        path = getattr(f, "name", f)  # `f` is an open file, or itself a path
        if isinstance(path, str | os.PathLike):
            keys = [str(key) for state in _state_dicts(obj) for key in state]
            self._recorder.record.saves.append(Save(str(Path(path).resolve()), keys))


def _state_dicts(value: Any) -> Iterator[dict[str, Tensor]]:
    if not isinstance(value, dict) or not value:
        return
    if all(isinstance(part, Tensor) for part in value.values()):
        yield value
        return
    for part in value.values():
        yield from _state_dicts(part)
