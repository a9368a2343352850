"""The observers of one rank. Each notes what the script does with a part of torch. The checks judge it, but for what
only the rank can see, as `clippings`, `changed` and `trained_in_no_optimizer`. The other modules here help them.

    observer    of what                     by
    loaders     samples and epochs          wrappers of a DataLoader's iterator
    networks    forwards and weights        torch's hooks for all modules, a wrapper of DDP.__init__
    optimizers  steps and parameters        torch's hook for all optimizers
    clipping    loss scaling and clipping   wrappers of GradScaler and of clip_grad_…
    files       saved files                 a wrapper of torch.save
    group       collectives                 wrappers of torch.distributed
    heartbeat   the script's line           a thread that looks every 0.2 s

Wrappers change neither arguments nor results. torch has no hook for DataLoaders, so `loaders` wraps the methods of the
private class `_BaseDataLoaderIter`; with a torch that renames them the start fails. What the script compiles runs
uncompiled, as the hooks do not work in it.
"""

import os
from pathlib import Path

from common.doctor.observers import files, group, heartbeat
from common.doctor.observers.clipping import ClippingObserver
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
    OptimizerObserver(recorder, networks, last_step).install()
    ClippingObserver(recorder).install()
    files.install(recorder)
    group.install(recorder, script)
    heartbeat.start(recorder, folder, script)
    return recorder
