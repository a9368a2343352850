"""The machine that a record belongs to, its load, and the circumstances of a recording."""

import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from common import ladder
from common.cores import available_cores
from common.instruments.result import quantity


def hardware_and_versions() -> dict:
    """The hardware, and the versions of Python and torch, to which the numbers of a record belong."""
    return {
        "processor": _processor(),
        "cores": available_cores(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def run_metadata() -> dict:
    """Circumstances of a recording: they differ from run to run, and so are no part of the machine."""
    return {
        "commit": _commit(),
        "command": _command(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load": load_averages(),
    }


def _commit() -> str | None:
    """The commit, with "-dirty" if a file differs from it, "-unknown" if git cannot tell; records do not count."""
    git = ("git", "--no-optional-locks", "-C", str(ladder.ROOT))
    commit = _output(*git, "rev-parse", "--short=12", "HEAD")
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    if commit and changed is None:
        return f"{commit}-unknown"
    return f"{commit}-dirty" if commit and changed else commit


def load_averages() -> list[float] | None:
    """The machine's load averages; None where the system does not tell them."""
    if not hasattr(os, "getloadavg"):
        return None
    return [round(value, 2) for value in os.getloadavg()]


def warn_if_busy(load: list[float] | None) -> None:
    """Say on stderr that other programs compute on this machine, if the `load` of `run_metadata` shows it."""
    cores = os.cpu_count() or 1  # of the machine, as the load is, and not those that this process may use
    if load and load[0] >= cores / 2:
        busy = f"This machine is busy: load {load[0]:.1f} on {quantity(cores, 'core')}. Do not trust the speeds."
        print(busy, file=sys.stderr, flush=True)


def _command() -> str:
    words = []
    for word in sys.orig_argv:
        start = word.find("=") + 1 if word.startswith("--") else 0  # of what --flag=PATH names
        path = Path(word[start:])
        words.append(word[:start] + path.name if path.is_absolute() else word)
    return shlex.join(words)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    known = cpuinfo.read_text() if cpuinfo.exists() else ""
    name = re.search(r"^model name\s*: *(.*)$", known, re.MULTILINE)
    return name[1].strip() if name else platform.machine()
