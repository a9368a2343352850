"""A level's train.py, and how many threads of gloo there were: `count_threads.py FOLDER LEVEL [the level's flags]`.

Each rank writes the numbers after the first step and at the end into a file of its own in FOLDER.
"""

import os
import sys
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

from common import ladder, process_group
from common.args import parse_args
from common.instruments.start import fit_to_machine


def threads() -> int:
    return sum("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))


def main() -> None:
    folder, level, *flags = sys.argv[1:]
    module = ladder.load(level)
    during = []
    register_optimizer_step_post_hook(lambda *args: during.append(threads()))
    module.train(fit_to_machine(parse_args(module.__file__, flags)))
    process_group.free_left_group()  # levels 03 and 04 keep their group here
    Path(folder, os.environ["RANK"]).write_text(f"{during[0]} {threads()}")


if __name__ == "__main__":
    main()
