"""The observers of one rank. Each notes what the script does with a part of torch, and judges nothing.

    observer    of what                     by
    loaders     samples and epochs          wrappers of a DataLoader's iterator
    networks    forwards and weights        torch's hooks for all modules, a wrapper of DDP.__init__
    optimizers  steps and parameters        torch's hooks for all optimizers
    clipping    loss scaling and clipping   wrappers of GradScaler and of clip_grad_…
    files       saved files                 a wrapper of torch.save
    group       collectives                 wrappers of torch.distributed
    heartbeat   the script's line           a thread that looks every 0.2 s

A wrapper (`Recorder.wrap`) calls the original and changes neither its arguments nor its result. torch has no hook for
DataLoaders, so `loaders` wraps the methods of the private class `_BaseDataLoaderIter`; a torch that renames them makes
the start fail at once, and not the findings wrong. The process ends with the script, so nothing is taken out of torch.
"""

import functools
import os
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from common.doctor.observers import files
from common.doctor.observers.clipping import ClippingObserver
from common.doctor.observers.group import GroupObserver
from common.doctor.observers.heartbeat import Heartbeat
from common.doctor.observers.loaders import LoaderObserver
from common.doctor.observers.networks import NetworkObserver
from common.doctor.observers.optimizers import OptimizerObserver
from common.doctor.observers.recorder import Recorder
from common.doctor.record import FILE


def install(folder: Path, script: Path, last_step: int | None) -> Recorder:
    """Let all observers note what `script` does on this rank, and end it after an optimizer step."""
    recorder = Recorder(folder / FILE, int(os.environ["RANK"]))
    loaders = LoaderObserver(recorder)
    networks = NetworkObserver(recorder, loaders)
    loaders.install()
    networks.install()
    OptimizerObserver(recorder, networks).install()
    ClippingObserver(recorder).install()
    files.install(recorder)
    GroupObserver(recorder, script).install()
    if last_step is not None:
        register_optimizer_step_post_hook(functools.partial(end_after, last_step, recorder))
    Heartbeat(recorder, folder, script).start()
    return recorder


def end_after(last_step: int, recorder: Recorder, *_: Any) -> None:
    """A hook of all optimizers that ends the process after a step."""
    if len(recorder.record.steps) == last_step:
        recorder.finish("steps")
        os._exit(0)
