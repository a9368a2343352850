"""Processes from a notebook: forked, again and again, whatever the notebook did before."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from common.accelerator import Accelerator
from common.accelerator.launchers import debug_launcher, notebook_launcher
from common.accelerator.state import AcceleratorState, PartialState
from common.launch import free_port
from common.process_group import leave_process_group
from common.processes import ranks
from tests.jobs import run_to_end
from tests.peers import import_or_skip

CELLS = Path(__file__).parent / "launched" / "fork_after_threads.py"
ON_CPU = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="launches without ACCELERATE_USE_CPU")


def environment() -> dict:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TORCHINDUCTOR"))}


@pytest.fixture(autouse=True)
def clean():
    before = environment()
    yield
    assert environment() == before


def note(folder, text) -> None:
    (folder / os.environ.get("RANK", "alone")).write_text(str(text))


def notes(folder) -> dict:
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_closure_is_launched_again_and_again(tmp_path):
    """Closures, arguments that cannot be pickled, a result that cannot be pickled, several launches in one process.

    That has left a group. A fork has it without its threads: whoever drops it there would wait for them for ever.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.zeros(1))
    leave_process_group()
    for attempt in range(2):
        folder = tmp_path / str(attempt)
        folder.mkdir()

        def train(add, folder=folder):
            state = PartialState()
            total = torch.tensor(float(add(state.process_index)))
            torch.distributed.all_reduce(total)
            note(folder, f"{total.item()} {state.distributed_type} {state.device}")
            state.destroy_process_group()
            return lambda: None

        debug_launcher(train, (lambda rank, attempt=attempt: rank + attempt,), num_processes=2)
        expected = f"{1.0 + 2 * attempt} DistributedType.MULTI_CPU cpu"
        assert notes(folder) == {"0": expected, "1": expected}
    assert not PartialState._shared_state, "the launching process takes no part"


@pytest.mark.slow
def test_a_fork_after_openmp_threads_does_not_hang():
    """libgomp's pool does not survive a fork: a forked process that used two threads would wait for ever."""
    result = run_to_end([sys.executable, str(CELLS)], seconds=60)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["after 4", "before 4", "threads 1", "threads 1"]


@ON_CPU
def test_notebook_launcher_runs_one_process_right_here():
    notebook = Accelerator(mixed_precision="bf16", cpu=True)
    seen = []

    def train(accelerator=None):
        seen.append((os.getpid(), Accelerator(cpu=True).mixed_precision))

    notebook_launcher(train, num_processes=1, mixed_precision="FP16")
    assert seen == [(os.getpid(), "fp16")]

    def breaks():
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        notebook_launcher(breaks, num_processes=1)
    assert AcceleratorState().mixed_precision == notebook.mixed_precision == "bf16"


@ON_CPU
def test_a_notebook_that_has_an_accelerator_may_launch(tmp_path):
    """accelerate refuses to launch once an Accelerator exists, and drops mixed_precision on the way."""
    Accelerator(mixed_precision="no", cpu=True)

    def train():
        note(tmp_path, Accelerator(cpu=True).mixed_precision)

    notebook_launcher(train, num_processes=2, mixed_precision="bf16", use_port=str(free_port()))
    assert notes(tmp_path) == {"0": "bf16", "1": "bf16"}


def test_a_failing_rank_ends_the_launch_with_its_traceback():
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    def train():
        if os.environ["RANK"] == "1":
            raise ValueError("the reason")

    with pytest.raises(ChildFailedError, match="ValueError: the reason") as failed:
        debug_launcher(train)
    assert list(failed.value.failures) == [1]


def test_signal_handlers_survive_a_launch(tmp_path):
    def train():
        note(tmp_path, signal.getsignal(signal.SIGINT) is mine)

    def mine(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, mine)
    try:
        debug_launcher(train)
        assert signal.getsignal(signal.SIGINT) is mine
        assert notes(tmp_path) == {"0": "True", "1": "True"}
    finally:
        signal.signal(signal.SIGINT, before)


@ON_CPU
@pytest.mark.parametrize("arguments", [{"master_addr": "10.0.0.1"}, {"num_nodes": 2}, {"rdzv_backend": "etcd"}])
def test_notebook_launcher_refuses_what_has_no_meaning_on_one_machine(arguments):
    with pytest.raises(NotImplementedError, match="a notebook launches on one machine"):
        notebook_launcher(pytest.fail, ("ran",), num_processes=1, **arguments)
    with pytest.raises(ValueError, match="Unknown mixed_precision mode: half"):
        notebook_launcher(pytest.fail, ("ran",), num_processes=1, mixed_precision="half")


@ON_CPU
def test_where_forking_would_not_work_it_is_not_tried(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="restart the kernel"):
        notebook_launcher(print, num_processes=2)
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(NotImplementedError, match=r"common\.accelerator launch"):
        notebook_launcher(print, num_processes=2)


@ON_CPU
def test_without_gpus_the_function_runs_here():
    seen = []
    notebook_launcher(lambda: seen.append(os.getpid()))
    notebook_launcher(lambda: seen.append(os.getpid()), num_processes=0)
    import_or_skip("accelerate").notebook_launcher(lambda: seen.append(os.getpid()), num_processes=0)
    assert seen == [os.getpid()] * 3


def test_processes_that_compute_on_the_cpu_see_no_gpu(monkeypatch):
    """An optimizer would start CUDA, which takes memory of the first GPU and fails in a fork."""
    monkeypatch.setattr(torch.cuda, "_cached_device_count", 8)
    if torch.cuda.device_count() != 8:
        pytest.skip("this torch was built without CUDA")

    def train():
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        assert (torch.cuda.is_available(), torch.cuda.device_count()) == (False, 0)

    debug_launcher(train)
    pool = ranks(1, on_cpu=True)
    assert pool is not ranks(1)
    assert pool.run(os.getenv, "CUDA_VISIBLE_DEVICES") == [""]
    pool.stop()
    assert torch.cuda.device_count() == 8
