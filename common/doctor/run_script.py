"""One rank of the examined script: install the observers, and run the script as `python SCRIPT …` would.

    python common/doctor/run_script.py FOLDER LAST_STEP SCRIPT [ARGUMENTS …]

LAST_STEP is the optimizer step after which the script is ended, or None. The record of rank 0 goes to FOLDER/rank0.

The script may have a package `common` of its own. So this file is run by its path, has the repository in `sys.path`
only while it imports the observers, and then removes their modules from `sys.modules`. `record.write` pickles without
an import of `common`, and `recorder` tells this repository's files by their folder.
"""

import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import torch.multiprocessing

OWN_PROCESSES = (
    "the script starts its own processes with torch.multiprocessing, but the doctor starts one for each rank, "
    "as torchrun does: give it a script that reads RANK and WORLD_SIZE"
)


def run(folder: Path, last_step: int | None, script: Path, arguments: list[str]) -> None:
    """Run `script` under observation, up to an optimizer step or to its end. Its error is noted and raised."""
    imported_before = set(sys.modules)
    from common.doctor import checks
    from common.doctor.recorder import Recorder

    rank = int(os.environ["RANK"])
    recorder = Recorder(folder / f"rank{rank}", rank, script)
    checks.observe(recorder, last_step)
    for name in ("spawn", "start_processes"):
        setattr(torch.multiprocessing, name, refuse)
    for name in set(sys.modules) - imported_before:
        if name.split(".")[0] == "common":
            del sys.modules[name]

    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            line = line_of(error, script)
            recorder.finish("crash", f"{line}: {one_line(error)}".removeprefix(": "), line)
            raise
    recorder.finish("finished")


def line_of(error: BaseException, script: Path) -> str:
    """The innermost line of the script, as "train.py:9"; empty if none has run, as where its syntax is wrong."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(script)]
    return f"{script.name}:{lines[-1]}" if lines else ""


def one_line(error: BaseException) -> str:
    """The text of an error and of its causes, as "ValueError: no disk, from KeyError: 3"."""
    texts: list[str] = []
    cause: traceback.TracebackException | None = traceback.TracebackException.from_exception(error)
    while cause is not None:
        texts.append(" ".join("".join(cause.format_exception_only()).split()))
        cause = cause.__cause__ or cause.__context__  # also where `from None` hides it: it may be an error of gloo
    return ", from ".join(texts)


def refuse(*args: Any, **kwargs: Any) -> None:
    raise SystemExit(OWN_PROCESSES)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])
    folder, steps, script = sys.argv[1:4]
    last_step = None if steps == "None" else int(steps)
    run(Path(folder), last_step, Path(script), arguments=sys.argv[4:])
