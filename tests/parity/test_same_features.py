"""Features with a collective or a file of their own do what they do on Accelerate: hooks, local SGD, profiles."""

import contextlib
import functools
import importlib

import pytest
import torch
from torch.utils.data import DataLoader

from common.accelerator import local_sgd
from common.accelerator.utils import ProfileKwargs
from common.processes import ranks
from tests.bits import differences
from tests.parity.random_trainings import WIDTH, Script, run
from tests.peers import import_or_skip
from tests.states import OURS, THEIRS, on_a_rank
from tests.unit.accelerator.several_processes import on_ranks

import_or_skip("accelerate")


@on_a_rank
def hooked(library, hook, wrapper, option):
    utils = importlib.import_module(f"{library}.utils")
    kinds = utils.DDPCommunicationHookType
    handler = utils.DistributedDataParallelKwargs(
        comm_hook=kinds(hook), comm_wrapper=kinds(wrapper), comm_state_option=option
    )
    script = Script(samples=24, dropout=0.5, schedule="one cycle")
    seen = {}
    run(library, script, "", seen, kwargs_handlers=[handler])
    return seen


@functools.cache
def without_a_hook():
    return ranks(2).run(hooked, OURS, "no", "no", {})


@pytest.mark.parametrize(
    ("hook", "wrapper", "option"),
    [
        ("fp16", "no", {}),
        ("bf16", "no", {}),
        ("power_sgd", "fp16", {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2}),
    ],
)
def test_communication_hooks_give_the_weights_that_they_give_on_accelerate(hook, wrapper, option):
    ours = ranks(2).run(hooked, OURS, hook, wrapper, option)
    assert list(differences(ours, ranks(2).run(hooked, THEIRS, hook, wrapper, option))) == []
    assert list(differences(ours[0]["weights"], ours[1]["weights"])) == []
    # A hook that does nothing would pass too.
    assert not torch.equal(ours[0]["weights"][0]["0.weight"], without_a_hook()[0]["weights"][0]["0.weight"])


@on_a_rank
def local(library, local_sgd_steps, enabled):
    """The weights after each step of a training whose processes average them every few steps, and those at its end."""
    root = importlib.import_module(library)
    local_sgd_module = importlib.import_module(f"{library}.local_sgd")
    accelerator = root.Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.randn(28, WIDTH), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    averaging = local_sgd_module.LocalSGD(
        accelerator=accelerator, model=model, local_sgd_steps=local_sgd_steps, enabled=enabled
    )
    with averaging as steps:
        for batch in loader:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            seen.append(accelerator.unwrap_model(model).weight.detach().clone())
            steps.step()
    weights = accelerator.unwrap_model(model).weight.detach().clone()
    return seen, weights


@pytest.mark.parametrize("enabled", [True, False])
def test_local_sgd_gives_the_weights_that_it_gives_on_accelerate(enabled):
    ours = ranks(2).run(local, OURS, 3, enabled)
    assert list(differences(ours, ranks(2).run(local, THEIRS, 3, enabled))) == []
    (one_seen, one), (other_seen, other) = ours
    # Local steps differ between the processes, and the last average makes them agree.
    assert torch.equal(one_seen[-1], other_seen[-1]) is not enabled
    assert torch.equal(one, other)


def test_local_sgd_does_nothing_in_one_process():
    assert list(differences(local(OURS, 3, True), local(THEIRS, 3, True))) == []


def fail_in_local_sgd(accelerator):
    """On the main process the error ends it; the other one averages weight and bias."""
    # LocalSGD averages behind a barrier. Without that the other process's average meets the `reduce` below.
    accelerator.wait_for_everyone = lambda: None
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with contextlib.suppress(KeyError), local_sgd.LocalSGD(accelerator, model, local_sgd_steps=2):
        if accelerator.is_main_process:
            raise KeyError
    if accelerator.is_main_process:
        accelerator.reduce([parameter.data for parameter in model.parameters()], "mean")
    return True


def test_an_error_within_local_sgd_is_raised_at_once():
    assert on_ranks(2, fail_in_local_sgd, timeout=30) == [True, True]


@on_a_rank
def profiled(library, folder):
    root = importlib.import_module(library)
    utils = importlib.import_module(f"{library}.utils")
    handler = utils.ProfileKwargs(
        activities=["cpu"],
        record_shapes=True,
        output_trace_dir=str(folder),
        schedule_option={"wait": 1, "warmup": 1, "active": 1},
    )
    accelerator = root.Accelerator(cpu=True, kwargs_handlers=[handler])
    model = accelerator.prepare(torch.nn.Linear(WIDTH, 1))
    with accelerator.profile() as profiler:
        for _ in range(3):
            model(torch.ones(2, WIDTH))
            profiler.step()
    counted = {event.key: event.count for event in profiler.key_averages() if event.key.startswith("aten::")}
    with accelerator.profile(utils.ProfileKwargs()):
        pass
    return counted


def test_a_profile_holds_and_writes_what_it_does_on_accelerate(tmp_path):
    ours = profiled(OURS, tmp_path / "ours")
    theirs = profiled(THEIRS, tmp_path / "theirs")
    assert ours == theirs and ours["aten::linear"] == 1
    names = sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "theirs").iterdir()) == ["profile_0.json"]


def test_an_activity_that_cannot_be_profiled_is_named():
    with pytest.raises(ValueError, match="Invalid profiler activity: tpu"):
        ProfileKwargs(activities=["tpu"]).build()


@on_a_rank
def unwrapping(library):
    """The types and keys of compiled models, before and after they are unwrapped."""
    root = importlib.import_module(library)
    accelerator = root.Accelerator(dynamo_backend="eager", cpu=True)
    model = accelerator.prepare(torch.nn.Linear(WIDTH, 1))
    found = {"type": type(model).__name__, "forward": model(torch.ones(2, WIDTH)).shape}
    inside = torch.nn.DataParallel(torch.compile(torch.nn.Linear(WIDTH, 1), backend="eager"))
    outside = torch.compile(torch.nn.DataParallel(torch.nn.Linear(WIDTH, 1)), backend="eager")
    for name, wrapped in (("prepared", model), ("inside", inside), ("outside", outside)):
        for keep in (True, False):
            unwrapped = accelerator.unwrap_model(wrapped, keep_torch_compile=keep)
            found[name, keep] = type(unwrapped).__name__, list(unwrapped.state_dict())
        found[name] = list(accelerator.get_state_dict(wrapped)), list(wrapped.state_dict())
    kept = accelerator.unwrap_model(model)
    found["same"] = kept is model
    return found


def test_compiled_models_unwrap_as_on_accelerate():
    ours = unwrapping(OURS)
    assert ours == unwrapping(THEIRS)
    assert ours["type"] == "OptimizedModule"
