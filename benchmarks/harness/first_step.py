"""Run a script as its user would, and write down when it took its first optimizer step.

    python -m benchmarks.harness.first_step FOLDER SCRIPT FLAGS…

Each process leaves the time of day in seconds in FOLDER/RANK. Whoever steps an optimizer of torch, it calls the hook.
"""

import os
import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook


def main() -> None:
    folder = Path(sys.argv[1])
    script = sys.argv[2]
    sys.argv[:] = sys.argv[2:]
    note = folder / os.environ.get("RANK", "0")

    def first_only(*_) -> None:
        now = time.time()
        hook.remove()
        note.write_text(repr(now))

    hook = register_optimizer_step_post_hook(first_only)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
