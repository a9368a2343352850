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

from benchmarks import records
from benchmarks.overhead import missing
from benchmarks.paired import Samples
from common import ladder

PROCESSES = 2
TIMEOUT = 600  # seconds, for any one start
# Whose file they run, which of our modules in it they replace, by which of theirs, and the packages that it needs.
PEERS = {
    "03 on accelerate": ("03_accelerate", "common.accelerator", "accelerate", ["accelerate"]),
    "04 on transformers": ("04_trainer", "common.trainer", "transformers", ["accelerate", "transformers"]),
}
IMPORTS = {
    "torch": ("import torch", ["torch"]),
    "common.accelerator": ("from common.accelerator import Accelerator", []),
    "common.trainer": ("from common.trainer import Trainer, TrainingArguments", []),
    "accelerate": ("from accelerate import Accelerator", ["accelerate"]),
    "lightning.fabric": ("from lightning.fabric import Fabric", ["lightning"]),
    "transformers": ("from transformers import Trainer, TrainingArguments", ["accelerate", "transformers"]),
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
        began = time.time()
        steps = ["--max-steps", "1", "--eval-samples", "64"]
        start([*launcher, "-m", "benchmarks.first_step", folder, str(script), *steps, *flags])
        return max(float(note.read_text()) for note in Path(folder).iterdir()) - began


def launches(flags: tuple[str, ...], folder: Path) -> dict[str, Callable[[], float]]:
    """Seconds to the first step of every level, and of the peers that are here; `folder` takes their files."""
    starts = [(level, level, ladder.script(level)) for level in ladder.levels()]
    for name, (level, ours, theirs, packages) in PEERS.items():
        if not missing(*packages):
            starts.append((name, level, switched(level, ours, theirs, folder / theirs)))
    found = {}
    for name, level, script in starts:
        processes = PROCESSES if level in ladder.DISTRIBUTED else 1
        start_it = partial(seconds_to_first_step, script, processes, flags)
        found[f"{name}, {processes} process{'es' if processes > 1 else ''}"] = start_it
    return found


def switched(level: str, ours: str, theirs: str, folder: Path) -> Path:
    """The level's train.py on another library: a file in a folder of the level's name."""
    script = folder / level / "train.py"
    script.parent.mkdir(parents=True)
    script.write_text(ladder.script(level).read_text().replace(ours, theirs))
    return script


def imports() -> dict[str, Callable[[], float]]:
    """Seconds that a fresh Python takes for each import, torch's own included."""
    code = "import time; began = time.perf_counter(); {}; print(time.perf_counter() - began)"
    return {
        name: lambda statement=statement: float(start([sys.executable, "-c", code.format(statement)]).split()[-1])
        for name, (statement, packages) in IMPORTS.items()
        if not missing(*packages)
    }


def launch_record(samples: Samples) -> dict:
    return records.group("from the command to the first step", "s", samples)


def import_record(samples: Samples) -> dict:
    """With what each import adds to torch's."""
    added = [(name, "torch") for name in samples if name != "torch"]
    return records.group("import in a fresh process", "s", samples, differences=added)
