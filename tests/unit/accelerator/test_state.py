"""Who a process is, on which device and with which backend: as accelerate says, and where it says too little."""

import importlib
import inspect
import io
import os
import socket
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from common.accelerator import Accelerator
from common.accelerator.state import PartialState
from common.accelerator.utils import InitProcessGroupKwargs
from common.processes import free_port, ranks
from tests.states import THEIRS, forget_states

LIBRARIES = ("common.accelerator", "accelerate")


@pytest.fixture
def libraries():
    """Ours and theirs, both without a state before and after the test."""
    pytest.importorskip("accelerate")

    forget_states(THEIRS)
    yield [importlib.import_module(name) for name in LIBRARIES]
    forget_states(THEIRS)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def torchrun_environment(monkeypatch, rank: int, world_size: int, **more: str) -> None:
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    for name, value in (variables | more).items():
        monkeypatch.setenv(name, value)


# One process, the same as accelerate


def test_both_states_of_a_single_process_show_themselves_as_in_accelerate(libraries):
    shown = []
    for library in libraries:
        accelerator = library.Accelerator(cpu=True, mixed_precision="bf16")
        shown.append((repr(library.PartialState()), repr(accelerator.state), str(accelerator.distributed_type)))
    assert shown[0] == shown[1] and "Num processes: 1" in shown[0][0]


def test_both_states_have_the_attributes_of_accelerates(libraries):
    ours, theirs = ({}, {})
    for library, found in zip(libraries, (ours, theirs), strict=True):
        accelerator = library.Accelerator(cpu=True)
        for kind, state in (("partial", library.PartialState()), ("accelerator", accelerator.state)):
            names = [name for name in dir(state) if not name.startswith("_") and name != "ended"]
            found[kind] = {name for name in names if hasattr(state, name)}
    # That chooses a device, which is a function of the module here; the others are of parts that are out of scope.
    left_out = {"set_device", "deepspeed_plugin", "get_deepspeed_plugin", "select_deepspeed_plugin", "is_fsdp2"}
    left_out |= {"deepspeed_plugins", "device_mesh", "parallelism_config", "torch_tp_plugin"}
    left_out |= {"debug", "default_device", "fork_launched"}
    for kind in theirs:
        assert theirs[kind] - ours[kind] <= left_out
        # `on_main_process` and its like come with the inheritance.
        assert {name for name in ours[kind] - theirs[kind] if not name.startswith("on_")} == set()


@pytest.mark.parametrize("name", ["device", "num_processes", "process_index", "no_such_name"])
def test_a_state_that_was_reset_has_no_attributes(libraries, name):
    for library in libraries:
        accelerator = library.Accelerator(cpu=True)
        states = {library.PartialState(): "PartialState", accelerator.state: "AcceleratorState"}
        library.state.AcceleratorState._reset_state(True)
        for state, kind in states.items():
            with pytest.raises(AttributeError, match=f"{kind}.* object has no attribute .{name}") as raised:
                getattr(state, name)
            was_reset = f"This happens if `{kind}._reset_state()` was called" in str(raised.value)
            assert was_reset == (name != "no_such_name")


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


def test_decorators_give_the_function_itself_or_one_that_does_nothing(libraries):
    def work():
        return "worked"

    decided = []
    for library in libraries:
        state = library.PartialState(cpu=True)
        state.num_processes = 2
        state.distributed_type = library.DistributedType.MULTI_CPU
        for state.process_index in range(2):
            state.local_process_index = state.process_index
            decorated = [
                state.on_main_process(work),
                state.on_local_main_process(work),
                state.on_last_process(work),
                state.on_process(work, process_index=1),
                state.on_process(process_index=0)(work),
                state.on_local_process(work, local_process_index=1),
            ]
            decided.append([(function is work, function()) for function in decorated])
        library.state.AcceleratorState._reset_state(True)
        with pytest.raises(ValueError, match="must be initialized before calling this function"):
            state.on_main_process(work)
    assert decided[:2] == decided[2:]


def test_splitting_a_dict_leaves_the_scripts_own_as_it_is():
    """accelerate cuts the values in place, so that a second split loses samples."""
    state = PartialState(cpu=True)
    state.num_processes = 2
    inputs = {"x": [1, 2, 3, 4]}
    for _ in range(2):
        with state.split_between_processes(inputs) as share:
            assert share == {"x": [1, 2]}
    assert inputs == {"x": [1, 2, 3, 4]}


def test_launchers_take_the_arguments_of_accelerates(libraries):
    for name in ("notebook_launcher", "debug_launcher"):
        ours, theirs = (inspect.signature(getattr(library, name)).parameters for library in libraries)
        assert list(ours) == list(theirs)
        differ = [each for each in ours if ours[each].default != theirs[each].default]
        assert differ == (["use_port"] if name == "notebook_launcher" else [])  # a free port


# The environment


def group_of_one():
    state = PartialState(cpu=True)
    total = torch.ones(1)
    dist.all_reduce(total)
    state.wait_for_everyone()
    saved = io.BytesIO()
    torch.save(total, saved)
    saved.seek(0)
    total = torch.load(saved, map_location=state.device)
    described = repr(state), state.use_distributed, int(total)
    forget_states()
    return described


def group_of_one_there():
    from accelerate.state import PartialState as TheirState

    state = TheirState(cpu=True)
    described = repr(state).replace("cpu:0", "cpu"), state.use_distributed, 1
    forget_states(THEIRS)
    return described


def test_under_torchrun_one_process_is_a_group_of_one_as_in_accelerate():
    """On a device that torch.load takes: accelerate's is cpu:0."""
    pytest.importorskip("accelerate")
    (ours,) = ranks(1).run(group_of_one)
    (theirs,) = ranks(1).run(group_of_one_there, environment={"OMP_NUM_THREADS": "1"})
    assert ours == theirs and "MULTI_CPU  Backend: gloo" in ours[0]


def test_a_backend_that_cannot_be_had_is_refused_with_the_one_that_can(monkeypatch):
    torchrun_environment(monkeypatch, 0, 2)
    with pytest.raises(ValueError, match="assigned backend nccl is not available, please use gloo"):
        PartialState(cpu=True, backend="nccl")


# GPUs, without one


@pytest.fixture
def two_gpus(monkeypatch):
    """What PartialState asks of CUDA and of torch.distributed, answered as with two GPUs; calls are kept."""
    calls = mock.Mock()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", calls.set_device)
    store = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *args, **kwargs: iter([(store, 0, 1)]))
    monkeypatch.setattr(dist, "init_process_group", calls.init_process_group)
    monkeypatch.setattr(dist, "get_backend", lambda: calls.init_process_group.call_args.args[0])
    return calls


def test_nccl_gets_its_device_so_that_it_fails_early_and_gloo_gets_none(two_gpus, monkeypatch, threads):
    torchrun_environment(monkeypatch, 0, 1)
    state = PartialState()
    assert (state.backend, state.device) == ("nccl", torch.device("cuda", 0))
    assert two_gpus.init_process_group.call_args.kwargs["device_id"] == torch.device("cuda", 0)
    assert two_gpus.init_process_group.call_args.kwargs["timeout"] == timedelta(minutes=10)
    PartialState._reset_state()
    PartialState(backend="gloo")
    assert two_gpus.init_process_group.call_args.kwargs["device_id"] is None


@pytest.mark.parametrize(("asked", "holds"), [(None, 30), (10, 10), (30, 30), (5, 5)])
def test_a_timeout_that_was_asked_for_holds_on_gloo_too(asked, holds, monkeypatch, threads):
    """In minutes. 10 is what the handler shows where nobody asks, because it is the default of nccl."""
    torchrun_environment(monkeypatch, 0, 1)
    monkeypatch.setattr(dist, "init_process_group", mock.Mock(wraps=dist.init_process_group))
    handler = InitProcessGroupKwargs() if asked is None else InitProcessGroupKwargs(timeout=timedelta(minutes=asked))
    Accelerator(cpu=True, kwargs_handlers=[handler])
    assert dist.init_process_group.call_args.kwargs["timeout"] == timedelta(minutes=holds)


def test_processes_that_share_a_gpu_use_gloo(two_gpus, monkeypatch, threads):
    torchrun_environment(monkeypatch, 0, 1, LOCAL_WORLD_SIZE="3")
    state = PartialState()
    assert (state.backend, state.device) == ("gloo", torch.device("cuda", 0))


def test_partial_state_stays_on_the_cpu_where_the_launcher_says_so(two_gpus, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert PartialState().device == torch.device("cpu")


def test_processes_with_gpus_share_the_cores_too(two_gpus, monkeypatch, threads):
    """torchrun leaves each one thread, on which batches would be assembled."""
    torchrun_environment(monkeypatch, 0, 1, LOCAL_WORLD_SIZE="2")
    torch.set_num_threads(1)
    monkeypatch.setattr("common.cores.available_cores", lambda: 16)
    PartialState()
    assert torch.get_num_threads() == 8


def unequal_nodes():
    """Rank 1 is on a node with a GPU, rank 0 on one without."""
    forget_states()
    rank = int(os.environ["RANK"])
    patches = [
        mock.patch.object(socket, "gethostname", lambda: f"node-{rank}"),
        mock.patch.object(torch.cuda, "is_available", lambda: rank == 1),
        mock.patch.object(torch.cuda, "device_count", lambda: rank),
        mock.patch.object(torch.cuda, "set_device", lambda device: None),
    ]
    for patch in patches:
        patch.start()
    try:
        PartialState(timeout=timedelta(seconds=20))
    except ValueError as error:
        return str(error), dict(PartialState._shared_state)
    finally:
        mock.patch.stopall()


def test_nodes_that_choose_different_backends_are_named_on_all_ranks_instead_of_a_hang():
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for message, state in ranks(2).run(unequal_nodes, environment=alone):
        assert "gloo on node-0, nccl on node-1" in message and state == {}
