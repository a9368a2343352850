"""The process group: its backend, and the collectives of all ranks."""

import functools
import inspect
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from common.doctor.observers.heartbeat import script_line
from common.doctor.observers.recorder import Recorder
from common.doctor.record import Call
from common.process_group import COLLECTIVES


def install(recorder: Recorder, script: Path) -> None:
    def before_collective(name: str, parameters: inspect.Signature, *args: Any, **kwargs: Any) -> None:
        group = parameters.bind(*args, **kwargs).arguments.get("group")
        if dist.is_initialized() and group in (None, dist.group.WORLD):
            call = Call(name, script_line(sys._getframe(), script) or "?")
            if "gather" in name and recorder.record.epochs:
                recorder.record.epochs[-1].gathers = True
            if call not in recorder.record.collectives:
                recorder.record.collectives[call] = None
                recorder.write()  # this very call may abort the process

    def before_join(*args: Any) -> None:
        recorder.record.has_joined = True

    for name in (*COLLECTIVES, "barrier", "monitored_barrier"):
        before = functools.partial(before_collective, name, inspect.signature(getattr(dist, name)))
        recorder.wrap(dist, name, before=before)
    recorder.wrap(Join, "__enter__", before=before_join)
    # The backend is known only while there is a group.
    recorder.wrap(dist, "destroy_process_group", before=lambda *_, **__: recorder.write())
