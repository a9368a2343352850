"""One rank of the examined script: install the observers, and run the script as `python SCRIPT …` would.

    python common/doctor/run_script.py FOLDER LAST_STEP SCRIPT [ARGUMENTS …]

This file is run by its path, and removes this repository's modules from `sys.modules`, because the script may have a
package `common` of its own. The process ends with the script, so the observers need not be taken out of torch.
"""

import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import torch.multiprocessing


def run(folder: Path, rank: int, last_step: int | None, script: Path, arguments: list[str]) -> None:
    """Run `script` under observation. Its error is noted and raised."""
    imported_before = set(sys.modules)
    from common.doctor import data, end, files, heartbeat, networks, optimizers, steps
    from common.doctor.record import RECORD
    from common.doctor.recorder import Recorder

    recorder = Recorder(folder / RECORD, rank)
    observed_data = data.watch(recorder)
    observed_networks = networks.watch(recorder, observed_data)
    optimizers.watch(recorder, observed_networks, last_step)
    steps.watch(recorder)
    files.watch(recorder)
    end.watch(recorder, script)
    heartbeat.start(recorder, folder, script)
    for name in ("spawn", "start_processes"):
        setattr(torch.multiprocessing, name, refuse)
    for name in set(sys.modules) - imported_before:
        if name.split(".")[0] == "common":
            del sys.modules[name]

    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as exit:
        if exit.code not in (None, 0):
            if not isinstance(exit.code, int):
                recorder.record.crash = str(exit.code)
            recorder.finish("crash")
            raise
    except BaseException as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(script)]
        where = f"{script.name}:{lines[-1]}: " if lines else ""
        recorder.record.crash = f"{where}{type(error).__name__}: {' '.join(str(error).split())}"
        recorder.finish("crash")
        raise
    recorder.finish("whole")


def refuse(*args: Any, **kwargs: Any) -> None:
    raise SystemExit(
        "the script starts its own processes with torch.multiprocessing, but the doctor starts one for each rank, "
        "as torchrun does: give it a script that reads RANK and WORLD_SIZE"
    )


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])
    run(
        folder=Path(sys.argv[1]),
        rank=int(os.environ["RANK"]),
        last_step=int(sys.argv[2]) or None,
        script=Path(sys.argv[3]),
        arguments=sys.argv[4:],
    )
