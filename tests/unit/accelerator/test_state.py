"""The state of a process, its device and its backend are those of accelerate; more is said where it says too little."""

import importlib
import io
from datetime import timedelta
from operator import attrgetter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

from common.accelerator.state import DistributedType, PartialState
from common.accelerator.utils import InitProcessGroupKwargs
from common.cores import available_cores
from common.launch import free_port, rank_variables
from common.processes import ranks
from tests.peers import import_or_skip
from tests.states import OURS, THEIRS, on_a_rank
from tests.unit.accelerator.several_processes import on_ranks


def test_states_show_themselves_as_in_accelerate(libraries):
    ours, theirs = [library.Accelerator(cpu=True, mixed_precision="bf16") for library in libraries]
    assert repr(ours.state) == repr(theirs.state)
    assert str(ours.distributed_type) == str(theirs.distributed_type)
    our_process, their_process = [repr(library.PartialState()) for library in libraries]
    assert our_process == their_process
    assert "Num processes: 1" in our_process


OFF = [
    "deepspeed_plugin", "state.deepspeed_plugin", "parallelism_config", "state.parallelism_config", "torch_device_mesh",
    "multi_device", "non_blocking", "use_seedable_sampler", "use_stateful_dataloader",
]  # fmt: skip


@pytest.mark.parametrize("attribute", OFF)
def test_an_accelerator_says_that_it_is_off(attribute, libraries):
    ours, theirs = [attrgetter(attribute)(library.Accelerator(cpu=True)) for library in libraries]
    assert ours is theirs and not ours


def test_programs_may_ask_what_is_installed_and_which_kind_of_run_it_is(libraries):
    for library in libraries:
        accelerator = library.Accelerator(cpu=True)
        for kind in ("DEEPSPEED", "FSDP", "MULTI_GPU", "MEGATRON_LM", "XLA"):
            assert accelerator.distributed_type != library.DistributedType[kind]
        assert not library.utils.is_xpu_available()
        assert not library.utils.is_npu_available()
        assert not library.utils.is_deepspeed_available()
        assert not library.utils.is_peft_model(accelerator.prepare(torch.nn.Linear(1, 1)))
        assert library.utils.is_torch_version(">=", "2.0")
        assert not library.utils.compare_versions(Version("2.1"), "!=", "2.1.0")
    ours, theirs = libraries
    assert ours.PartialState().default_device == theirs.PartialState().default_device
    assert ours.state.AcceleratorState().fsdp_plugin is None  # theirs has no such attribute


def test_the_state_of_an_accelerator_needs_an_accelerator(libraries):
    for library in libraries:
        library.PartialState(cpu=True)
        assert not library.state.is_initialized()
        with pytest.raises(ValueError, match="Please make sure to properly initialize your accelerator"):
            library.state.AcceleratorState()
        library.state.AcceleratorState._reset_state()
        library.Accelerator(cpu=True, mixed_precision="bf16")
        assert library.state.AcceleratorState().mixed_precision == "bf16"
        with pytest.raises(ValueError, match="AcceleratorState has already been initialized and cannot be changed"):
            library.state.AcceleratorState(mixed_precision="no")


def test_an_accelerator_keeps_the_state_that_is_forgotten(libraries):
    ours, theirs = [library.Accelerator(cpu=True) for library in libraries]
    for library in libraries:
        library.state.AcceleratorState._reset_state()
    with pytest.raises(AttributeError, match="This happens if"):
        theirs.prepare(torch.nn.Linear(1, 1))
    ours.prepare(torch.nn.Linear(1, 1))


def call_where_decorated(accelerator) -> dict:
    return {
        "on_process": accelerator.on_process(process_index=1)(lambda: "ran")(),
        "on_local_process": accelerator.on_local_process(local_process_index=1)(lambda: "ran")(),
    }


def test_a_function_runs_on_the_rank_that_its_decorator_names(libraries):
    ran = {"on_process": "ran", "on_local_process": "ran"}
    not_run = {"on_process": None, "on_local_process": None}
    assert on_ranks(2, call_where_decorated) == [not_run, ran]
    for library in libraries:  # as in a script that is tried on one process
        assert call_where_decorated(library.Accelerator(cpu=True)) == ran


def rank_of_two(accelerator):
    rank = accelerator.process_index
    assert accelerator.num_processes == 2 and accelerator.local_process_index == rank
    assert accelerator.distributed_type == DistributedType.MULTI_CPU and accelerator.state.backend == "gloo"
    assert accelerator.is_main_process is accelerator.is_local_main_process is (rank == 0)
    return rank


def test_world_size_means_one_run_on_cpus_too():
    # https://github.com/huggingface/accelerate/issues/2741: there, N lonely "main" processes.
    assert on_ranks(2, rank_of_two) == [0, 1]


@on_a_rank
def describe_group_of_one(library) -> dict:
    state = importlib.import_module(f"{library}.state").PartialState(cpu=True)
    saved = io.BytesIO()
    torch.save(torch.ones(1), saved)
    saved.seek(0)
    device = state.device if library == OURS else "cpu"  # accelerate's is cpu:0, which torch.load refuses
    return {
        "state": repr(state).replace("cpu:0", "cpu"),
        "use_distributed": state.use_distributed,
        "loaded_to_its_device": torch.load(saved, map_location=device),
    }


def test_under_torchrun_one_process_is_a_group_of_one_as_in_accelerate():
    import_or_skip("accelerate")
    (ours,) = ranks(1).run(describe_group_of_one, OURS)
    (theirs,) = ranks(1).run(describe_group_of_one, THEIRS)
    assert ours == theirs
    assert "MULTI_CPU  Backend: gloo" in ours["state"]


def count_threads(accelerator):
    return torch.get_num_threads()


def test_cores_are_shared_out_unless_the_launcher_says_how_many_threads():
    """torchrun would leave every process one thread, whatever the number of cores."""
    assert on_ranks(2, count_threads) == [max(1, available_cores() // 2)] * 2
    assert on_ranks(2, count_threads, environment={"ACCELERATE_CPU_THREADS": "3"}) == [3, 3]


@pytest.fixture
def two_gpus(monkeypatch):
    """Answers to what PartialState asks of CUDA and of torch.distributed, as with two GPUs. The calls are kept."""
    calls = mock.Mock()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", calls.set_device)
    store = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *args, **kwargs: iter([(store, 0, 1)]))
    monkeypatch.setattr(dist, "init_process_group", calls.init_process_group)
    monkeypatch.setattr(dist, "get_backend", lambda: calls.init_process_group.call_args.args[0])
    threads_before = torch.get_num_threads()
    yield calls
    torch.set_num_threads(threads_before)


@pytest.fixture
def torchrun_with_gpus(two_gpus, monkeypatch):
    """A world of one process, which finds so many neighbours on its machine."""

    def start(local_world_size=1):
        for name, value in rank_variables(rank=0, world_size=1, port=free_port()).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_world_size))

    return start


def test_nccl_gets_its_device_and_gloo_none(two_gpus, torchrun_with_gpus):
    torchrun_with_gpus()
    state = PartialState()
    assert (state.backend, state.device) == ("nccl", torch.device("cuda", 0))
    assert two_gpus.init_process_group.call_args.kwargs["device_id"] == torch.device("cuda", 0)
    assert two_gpus.init_process_group.call_args.kwargs["timeout"] == timedelta(minutes=10)
    PartialState._reset_state()
    PartialState(backend="gloo")
    assert two_gpus.init_process_group.call_args.kwargs["device_id"] is None


def read_timeout(accelerator):
    return dist.group.WORLD._get_backend(accelerator.device).options._timeout


@pytest.mark.parametrize(("asked", "holds"), [(None, 30), (10, 10), (30, 30), (5, 5)])
def test_a_timeout_that_was_asked_for_holds_on_gloo_too(asked, holds):
    """The parameters are minutes. A process group of nccl would take 10 by default."""
    handler = InitProcessGroupKwargs() if asked is None else InitProcessGroupKwargs(timeout=timedelta(minutes=asked))
    found = on_ranks(2, read_timeout, kwargs_handlers=[handler])
    assert found == [timedelta(minutes=holds)] * 2


def test_processes_that_share_a_gpu_use_gloo(torchrun_with_gpus):
    torchrun_with_gpus(local_world_size=3)
    state = PartialState()
    assert (state.backend, state.device) == ("gloo", torch.device("cuda", 0))


def test_a_group_of_the_script_may_have_more_ranks_than_gpus(two_gpus, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    assert PartialState().device == torch.device("cuda", 0)


def test_partial_state_stays_on_the_cpu_where_the_launcher_says_so(two_gpus, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert PartialState().device == torch.device("cpu")
