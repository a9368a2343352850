"""One rank of the doctor's patient: install the observers, and run the script as `python SCRIPT …` would.

    python common/doctor/watched.py FOLDER LAST_STEP SCRIPT [ARGUMENTS …]

It is run by its path, and nothing of this repository stays imported: the script may have a `common` of its own.
"""

import os
import runpy
import sys
import traceback
from pathlib import Path


def run(folder: Path, rank: int, last_step: int | None, script: Path, arguments: list[str]) -> None:
    """Run `script` under observation. Its error is noted and raised."""
    imported_before = set(sys.modules)
    from common.doctor import watch_calls
    from common.doctor.watch_data import DataWatch
    from common.doctor.watch_models import ModelWatch
    from common.doctor.watcher import Watcher

    watcher = Watcher(folder, rank, script, last_step)
    data = DataWatch(watcher)
    models = ModelWatch(watcher, data)
    data.install()
    models.install()
    watch_calls.install(watcher)
    watcher.start()
    for name in set(sys.modules) - imported_before:
        if name.split(".")[0] == "common":
            del sys.modules[name]

    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            watcher.record.crash = f"exit code {end.code}" if isinstance(end.code, int) else str(end.code)
            watcher.finish("crash")
            raise
    except BaseException as error:
        lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(script)]
        line = f"{script.name}:{lines[-1].lineno}: " if lines else ""
        watcher.record.crash = f"{line}{type(error).__name__}: {' '.join(str(error).split())}"
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
