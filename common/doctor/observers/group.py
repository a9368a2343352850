"""The process group: its backend, and the collectives of all ranks."""

import functools
import inspect
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from common.doctor.observers.heartbeat import script_line
from common.doctor.observers.recorder import Recorder
from common.doctor.record import Call
from common.process_group import COLLECTIVES

ON_ALL_RANKS = (*COLLECTIVES, "barrier", "monitored_barrier")
MAX_WRITES = 256  # ranks that call different collectives do so early


class GroupObserver:
    """The process group of a script."""

    def __init__(self, recorder: Recorder, script: Path) -> None:
        self._recorder = recorder
        self._script = script

    def install(self) -> None:
        for name in ON_ALL_RANKS:
            before = functools.partial(self.before_collective, name, inspect.signature(getattr(dist, name)))
            self._recorder.wrap(dist, name, before=before)
        self._recorder.wrap(dist, "destroy_process_group", before=self.before_leaving)

    def before_collective(self, name: str, parameters: inspect.Signature, *args: Any, **kwargs: Any) -> None:
        group = parameters.bind(*args, **kwargs).arguments.get("group")
        if dist.is_initialized() and group in (None, dist.group.WORLD):
            line = script_line(sys._getframe(), self._script) or "?"
            collectives = self._recorder.record.collectives
            collectives.append(Call(name, line))
            if len(collectives) <= MAX_WRITES:  # this very call may abort the process
                self._recorder.write()

    def before_leaving(self, *args: Any, **kwargs: Any) -> None:
        self._recorder.write()  # the backend is known only while there is a group
