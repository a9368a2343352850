"""Many jobs, one after another, and many epochs: nothing hangs, grows, or is left behind."""

import gc
import os
import re
from pathlib import Path

import pytest
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from common import ladder, process_group
from common.args import parse_args
from common.model import BasicNet
from common.processes import ranks
from common.settings import fit_to_machine
from tests.jobs import ON_LINUX, run_to_end, script, torchrun
from tests.levels import SHORT, run_level

pytestmark = ON_LINUX

EPOCHS = 20
LONG = pytest.mark.long


@LONG
def test_launch_after_launch_ends_well_and_leaves_nothing_behind(tmp_path):
    before = set(os.listdir("/dev/shm"))
    for level in ladder.DISTRIBUTED:
        done = run_to_end(torchrun(script(level), *SHORT, "--max-steps", "1"), TMPDIR=str(tmp_path))
        assert done.returncode == 0, done.stderr
    # torchrun and torch leave empty folders.
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []
    assert [path for path in tmp_path.iterdir() if not path.name.startswith("torch")] == []
    new = set(os.listdir("/dev/shm")) - before
    assert [name for name in new if not is_in_use(name)] == []


def is_in_use(name: str) -> bool:
    """True for shared memory of torch (`torch_PID_…`) whose process runs: that of a test in another worker."""
    maker = re.match(r"torch_(\d+)_", name)
    return maker is not None and Path(f"/proc/{maker[1]}").exists()


def gloo_threads() -> int:
    return sum("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))


def threads_of(level: str) -> tuple[int, int]:
    """How many threads of gloo this rank has more after the first step of a level, and after its end."""
    process_group.free_left_group()
    before = gloo_threads()  # of the jobs before: torch may keep the groups of their meshes
    during = []
    after_step = register_optimizer_step_post_hook(lambda *_: during.append(gloo_threads()))
    run_level(level, [*SHORT, "--max-steps", "1"])
    after_step.remove()
    process_group.free_left_group()  # Levels 03 and 04 keep their group in this process.
    return during[0] - before, gloo_threads() - before


@pytest.mark.parametrize(
    "level", [*(pytest.param(level, marks=pytest.mark.slow) for level in ("02_ddp_raw", "03_accelerate")), "04_trainer"]
)
def test_nothing_else_keeps_the_group_of_a_level_that_has_ended(level):
    """A thread of it may still hold a tensor when the interpreter ends, and then aborts the process."""
    for during, after in ranks(2).run(threads_of, level):
        assert during > 0 and after == 0


def used(level: str, argv: list[str]) -> list[tuple[int, int]]:
    """The resident memory in bytes and the number of open files at each evaluation, which has one batch."""
    samples = []

    def sample(network, inputs):
        if isinstance(network, BasicNet) and not network.training:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            samples.append((pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))))

    module = ladder.load(level)
    before_forward = register_module_forward_pre_hook(sample)
    module.train(fit_to_machine(parse_args(module.__file__, argv)))
    before_forward.remove()
    return samples


@LONG
@pytest.mark.parametrize("level", ["02_ddp_raw", *ladder.WITH_CHECKPOINTS])
def test_memory_and_open_files_do_not_grow_over_twenty_epochs(level, tmp_path):
    argv = [*SHORT, "--epochs", str(EPOCHS), "--eval-samples", "12"]
    if level != "02_ddp_raw":
        argv += ["--checkpoint-dir", str(tmp_path), "--checkpoint-every", "2"]
    for samples in ranks(2).run(used, level, argv):
        assert len(samples) == EPOCHS
        # The allocator's share comes and goes; 4.8 MB of weights kept in every epoch would not go.
        memory = [resident >> 20 for resident, _ in samples]
        assert min(memory[-5:]) - min(memory[2:7]) < 15, memory
        assert len({files for _, files in samples[4:]}) == 1, [files for _, files in samples]
