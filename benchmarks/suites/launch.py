"""What starting costs: from the command to the first optimizer step, and how much of that is importing.

Levels start as their users start them: 00 and 01 with python, 02 to 04 under torchrun with two processes, of which the
slower counts. The peers run the same files of levels 03 and 04 with the import switched. Every sample is a new process;
the files are in the page cache by then, as they are from the second start on.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import records
from benchmarks.harness.groups import Extent, Group, chosen
from benchmarks.harness.paired import Samples, measure
from benchmarks.suites.overhead import missing, skipped
from common import ladder

PROCESSES = 2
TIMEOUT = 600  # seconds, for any one start


class Peer(NamedTuple):
    """Another library, on which a level's script runs as well."""

    level: str
    ours: str  # the module that the script imports
    theirs: str  # the one that takes its place
    packages: tuple[str, ...]  # what has to be installed


class ImportCase(NamedTuple):
    """An import to be timed, and the packages that it needs."""

    statement: str
    packages: tuple[str, ...]


PEERS = {
    "03 on accelerate": Peer("03_accelerate", "common.accelerator", "accelerate", ("accelerate",)),
    "04 on transformers": Peer("04_trainer", "common.trainer", "transformers", ("accelerate", "transformers")),
}
IMPORTS = {
    "torch": ImportCase("import torch", ("torch",)),
    "common.accelerator": ImportCase("from common.accelerator import Accelerator", ()),
    "common.trainer": ImportCase("from common.trainer import Trainer, TrainingArguments", ()),
    "accelerate": ImportCase("from accelerate import Accelerator", ("accelerate",)),
    "lightning.fabric": ImportCase("from lightning.fabric import Fabric", ("lightning",)),
    "transformers": ImportCase("from transformers import Trainer, TrainingArguments", ("accelerate", "transformers")),
}


class LaunchFailed(RuntimeError):
    """A started program did not end well; the message is what it wrote."""


def start(command: list[str]) -> str:
    """Run the command in the repository's root. Returns its stdout; raises LaunchFailed."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ladder.ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, cwd=ladder.ROOT, env=environment)
    if done.returncode:
        raise LaunchFailed(f"{' '.join(command)} ended with exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def seconds_to_first_step(script: Path, processes: int, flags: tuple[str, ...]) -> float:
    """Wall time from starting the command until the last process has taken its first step."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    with tempfile.TemporaryDirectory() as folder:
        program = ["-m", "benchmarks.harness.first_step", folder]
        level = [str(script), "--max-steps", "1", "--eval-samples", "64", *flags]
        began = time.time()
        start([*launcher, *program, *level])
        ended = [float(note.read_text()) for note in Path(folder).iterdir()]
        return max(ended) - began


IMPORT_TITLE = "import in a fresh process"
LAUNCH_TITLE = "from the command to the first step"


def groups() -> list[Group]:
    return [
        Group("import", IMPORT_TITLE, tuple(imports()), measured_imports),
        Group("launch", LAUNCH_TITLE, tuple(launch_names()), measured_launches),
    ]


def measured_imports(rows: tuple[str, ...], extent: Extent) -> dict:
    contestants = chosen(imports(), rows)
    if not extent.quick:
        measure(contestants, 1)  # uncounted: it brings the files into the page cache
    samples = measure(contestants, 1 if extent.quick else extent.rounds)
    return import_record(samples) | {"skipped": skipped()}


def measured_launches(rows: tuple[str, ...], extent: Extent) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        contestants = chosen(launches(extent.data_flags, Path(folder)), rows)
        samples = measure(contestants, 1 if extent.quick else extent.rounds)
    return launch_record(samples) | {"skipped": skipped()}


def launch_names() -> list[str]:
    """The names of `launches`, in its order."""
    names = [_launch_name(level) for level in ladder.levels()]
    return names + [_peers_name(name) for name in _peers_here()]


def _launch_name(level: str) -> str:
    return f"{level}, {PROCESSES} processes" if level in ladder.DISTRIBUTED else f"{level}, 1 process"


def _peers_name(peer: str) -> str:
    return f"{peer}, {PROCESSES} processes"


def _peers_here() -> list[str]:
    return [name for name, peer in PEERS.items() if not missing(*peer.packages)]


def launches(flags: tuple[str, ...], folder: Path) -> dict[str, Callable[[], float]]:
    """Seconds to the first step of every level, and of the peers that are here; `folder` takes their files."""
    found = {}
    for level in ladder.levels():
        processes = PROCESSES if level in ladder.DISTRIBUTED else 1
        found[_launch_name(level)] = partial(seconds_to_first_step, ladder.script(level), processes, flags)
    for name in _peers_here():
        script = switched(PEERS[name], folder / PEERS[name].theirs)
        found[_peers_name(name)] = partial(seconds_to_first_step, script, PROCESSES, flags)
    return found


def switched(peer: Peer, folder: Path) -> Path:
    """The level's train.py on another library: a file in a folder of the level's name."""
    script = folder / peer.level / "train.py"
    script.parent.mkdir(parents=True)
    source = ladder.script(peer.level).read_text()
    script.write_text(source.replace(peer.ours, peer.theirs))
    return script


def imports() -> dict[str, Callable[[], float]]:
    """Seconds that a fresh Python takes for each import, torch's own included."""
    return {
        name: partial(seconds_to_import, case.statement)
        for name, case in IMPORTS.items()
        if not missing(*case.packages)
    }


def seconds_to_import(statement: str) -> float:
    code = f"import time; began = time.perf_counter(); {statement}; print(time.perf_counter() - began)"
    *_, seconds = start([sys.executable, "-c", code]).split()
    return float(seconds)


def launch_record(samples: Samples) -> dict:
    return records.group(LAUNCH_TITLE, "s", samples)


def import_record(samples: Samples) -> dict:
    """With what each import adds to torch's."""
    added = [(name, "torch") for name in samples if name != "torch"]
    return records.group(IMPORT_TITLE, "s", samples, differences=added)
