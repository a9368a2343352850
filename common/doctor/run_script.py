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


def run(folder: Path, rank: int, last_step: int | None, script: Path, arguments: list[str]) -> None:
    """Run `script` under observation. Its error is noted and raised."""
    imported_before = set(sys.modules)
    from common.doctor import heartbeat, watch_calls, watch_data, watch_networks, watch_optimizers, watch_scalers
    from common.doctor.record import RECORD
    from common.doctor.watcher import Watcher

    watcher = Watcher(folder / RECORD, rank)
    data = watch_data.install(watcher)
    networks = watch_networks.install(watcher, data)
    watch_optimizers.install(watcher, networks, last_step)
    watch_scalers.install(watcher)
    watch_calls.install(watcher, script)
    heartbeat.start(watcher, folder, script)
    for name in set(sys.modules) - imported_before:
        if name.split(".")[0] == "common":
            del sys.modules[name]

    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            if not isinstance(end.code, int):
                watcher.record.crash = str(end.code)
            watcher.finish("crash")
            raise
    except BaseException as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(script)]
        where = f"{script.name}:{lines[-1]}: " if lines else ""
        watcher.record.crash = f"{where}{type(error).__name__}: {' '.join(str(error).split())}"
        watcher.finish("crash")
        raise
    watcher.finish("whole")


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])
    run(
        folder=Path(sys.argv[1]),
        rank=int(os.environ["RANK"]),
        last_step=int(sys.argv[2]) or None,
        script=Path(sys.argv[3]),
        arguments=sys.argv[4:],
    )
