"""Features with a collective or a file of their own do what they do on Accelerate: hooks, profiles."""

import functools
import importlib

import pytest
import torch

from common.accelerator.utils import ProfileKwargs
from common.processes import ranks
from tests.parity.random_scripts import differences
from tests.parity.random_trainings import WIDTH, Script, outcome
from tests.states import OURS, THEIRS, forget_states

pytest.importorskip("accelerate")


def hooked(library, hook, wrapper, option):
    """A training whose gradients are compressed while they travel."""
    utils = importlib.import_module(f"{library}.utils")
    kinds = utils.DDPCommunicationHookType
    handler = utils.DistributedDataParallelKwargs(
        comm_hook=kinds(hook), comm_wrapper=kinds(wrapper), comm_state_option=option
    )
    script = Script(samples=24, order="sequential", dropout=0.5, schedule="one cycle")
    found = outcome(library, script, kwargs_handlers=[handler])
    forget_states(library)
    return found


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
    assert ours[0]["error"] is None
    assert list(differences(ours[0]["weights"], ours[1]["weights"])) == []
    # A hook that does nothing would pass too.
    assert not torch.equal(ours[0]["weights"][0]["0.weight"], without_a_hook()[0]["weights"][0]["0.weight"])


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
    accelerator.end_training()
    forget_states(library)
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


def unwrapping(library):
    """What a compiled model is called, before and after it is unwrapped."""
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
    accelerator.end_training()
    forget_states(library)
    return found


def test_compiled_models_unwrap_as_on_accelerate():
    ours = unwrapping(OURS)
    assert ours == unwrapping(THEIRS)
    assert ours["type"] == "OptimizedModule"
