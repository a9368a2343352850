"""The checker of `zero1`: with which gradients each rank steps, how much state it keeps, and which weights come out."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from common.exercises.compare import agreed, flat, near, plain, scaled, side_by_side
from common.exercises.handles import all_waited_for
from common.exercises.stage import Place, in_rounds, load_name, on_ranks
from common.small.zero import ZeRO1

MINUTES = 30
READ = "02_ddp_raw/MEMORY_AND_ZERO.md"
SAME_AS = "ZeRO1 (common/small/zero/zero1.py), torch's ZeroRedundancyOptimizer, and DistributedDataParallel with AdamW"
WORLD_SIZES = (2, 3)
INPUTS = ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), (7.0, 2.0, 9.0))  # by rank
STEPS = 2
LAYERS = 5  # which the ranks cannot share out equally
LAYER_SIZE = 3  # numbers, which is odd: equal parts on two ranks have one of zero at their end
MOMENTS = 2 * LAYERS * LAYER_SIZE  # numbers in the whole state of AdamW
# AdamW divides by the gradient's size plus eps. With the usual 1e-8 a sum gives the same step as a mean.
SETTINGS: dict[str, Any] = {"lr": 0.1, "eps": 1.0}
HARD_TO_SEE = "AdamW divides by a gradient's size, so only a large eps, such as the one here, shows it"


def network() -> nn.Sequential:
    """Layers of equal size, which narrow to one number and widen again; no two numbers have the same gradient."""
    torch.manual_seed(0)
    shapes = [(LAYER_SIZE, 1), (1, LAYER_SIZE)] * LAYERS
    layers = [nn.Linear(*shape, bias=False) for shape in shapes[:LAYERS]]
    for layer in layers:
        nn.init.uniform_(layer.weight, 0.5, 1.5)
    return nn.Sequential(*layers).double()


def backward(model: nn.Module) -> None:
    model(torch.tensor([INPUTS[dist.get_rank()]]).double()).sum().backward()


def weights_of(module: nn.Module) -> list:
    return [plain(parameter.flatten()) for parameter in module.parameters()]


def gradients_of(parameters: Any) -> list:
    """The gradients as a list of numbers for each parameter that has one."""
    return [plain(parameter.grad.flatten()) for parameter in parameters if parameter.grad is not None]


def trained(model: nn.Module, optimizer: Any) -> list:
    """The weights after each step."""
    weights = []
    for _ in range(STEPS):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        weights.append(weights_of(model))
    return weights


def trained_by_torch() -> list:
    model = DistributedDataParallel(network())
    return trained(model, AdamW(model.parameters(), **SETTINGS))


def trained_by_torchs_zero() -> list:
    model = DistributedDataParallel(network())
    return trained(model, ZeroRedundancyOptimizer(model.parameters(), AdamW, **SETTINGS))


def trained_by_the_small_one() -> list:
    module = network()
    return trained(module, ZeRO1(module, AdamW, **SETTINGS))


def gradients_on_the_way(weights: list) -> tuple[list, list]:
    """This rank's own gradients before each step, and the means over the ranks, where the weights are right."""
    own = []
    mean = []
    for before in [weights_of(network()), *weights[:-1]]:
        module = network()
        for parameter, numbers in zip(module.parameters(), before, strict=True):
            parameter.data = torch.tensor(numbers).double().view_as(parameter)
        backward(module)
        own.append(gradients_of(module.parameters()))
        module.zero_grad()
        backward(DistributedDataParallel(module))
        mean.append(gradients_of(module.parameters()))
    return own, mean


class Steps:
    """What the optimizers of a solution have done.

    Attributes:
        gradients: for each step of any optimizer, the gradients with which it began.
        optimizers: those that have made a step, by identity.
    """

    def __init__(self) -> None:
        self.gradients: list[list] = []
        self.optimizers: dict[int, Optimizer] = {}

    def before(self, optimizer: Optimizer, *_: Any) -> None:
        self.gradients.append(gradients_of(p for group in optimizer.param_groups for p in group["params"]))

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        self.optimizers[id(optimizer)] = optimizer

    def kinds(self) -> list[str]:
        return [type(optimizer).__name__ for optimizer in self.optimizers.values()]

    def settings(self) -> list:
        """Those of SETTINGS that the optimizers have."""
        groups = flat(optimizer.param_groups for optimizer in self.optimizers.values())
        return [{name: group.get(name) for name in SETTINGS} for group in groups]

    def state_size(self) -> int:
        """How many numbers the optimizers keep; the number of the step, which has no dimension, is not counted."""
        states = [state for optimizer in self.optimizers.values() for state in optimizer.state.values()]
        tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return sum(tensor.numel() for tensor in tensors if tensor.dim())


@contextmanager
def observed_steps() -> Iterator[Steps]:
    """A block in which the steps of all optimizers of torch are noted."""
    steps = Steps()
    handles = [register_optimizer_step_pre_hook(steps.before), register_optimizer_step_post_hook(steps.after)]
    try:
        yield steps
    finally:
        for handle in handles:
            handle.remove()


def run(path: str) -> dict:
    """On one rank: gradients, state and weights of the solution, and those that are right."""
    expected = agreed(real=trained_by_torch(), zero=trained_by_torchs_zero(), small=trained_by_the_small_one())
    own, mean = gradients_on_the_way(expected)
    module = network()
    first = weights_of(module)
    with observed_steps() as steps, all_waited_for():
        weights = trained(module, load_name(path, "ZeRO1")(module, **SETTINGS))
    return {
        "first": first,
        "weights": weights,
        "expected": expected,
        "stepped_with": steps.gradients,
        "own": own,
        "mean": mean,
        "state": steps.state_size(),
        "settings": steps.settings(),
        "optimizers": steps.kinds(),
    }


def why_it_hangs(places: Sequence[Place | None]) -> str | None:
    codes = [place.code if place else "" for place in places]
    in_broadcast = ["broadcast(" in code for code in codes]
    if any(in_broadcast) and not all(in_broadcast):
        return (
            "they are at different collectives: every rank calls one for each parameter, and not only for those that it"
            " owns"
        )
    if any(in_broadcast):
        return (
            "a broadcast is not a send: the ranks that receive call it too. All ranks call it for each parameter, in"
            " the same order, and `src`, the same number on all of them, says who owns it"
        )
    return None


def check(path: Path) -> list[str]:
    """Two steps of a network with five layers, on two and on three ranks."""

    def on(world_size: int) -> list[str | None]:
        results = on_ranks(world_size, run, path, why_it_hangs)
        return [wrong_optimizers(results) or wrong_state(results) or wrong_numbers(results)]

    return in_rounds(WORLD_SIZES, on)


def wrong_optimizers(results: list[dict]) -> str | None:
    """A finding about the AdamWs with which the ranks step."""
    kinds = sorted({kind for result in results for kind in result["optimizers"]} - {AdamW.__name__})
    if kinds:
        return f"the steps were made by {kinds[0]}, and not by AdamW: each rank makes one torch.optim.AdamW"
    optimizers = [len(result["optimizers"]) for result in results]
    if max(optimizers) > 1:
        title = (
            "each rank makes one AdamW, in __init__, and keeps it, because a new one has no moments; those with which"
            " a rank has made steps:"
        )
        return side_by_side(title, optimizers, they_should_be=1)
    settings = [result["settings"] for result in results]
    if any(of_group != SETTINGS for of_group in flat(settings)):
        title = "AdamW has other settings than ZeRO1 was given: hand all of them on (**settings); its settings:"
        return side_by_side(title, settings, they_should_be=SETTINGS)
    return None


def wrong_state(results: list[dict]) -> str | None:
    """A finding about how much each rank keeps."""
    world_size = len(results)
    state = [result["state"] for result in results]
    # Equal parts have zeros at their end. Whole parameters, dealt out in turn, are less in all, or one more on a rank.
    of_equal_parts = 2 * LAYERS * math.ceil(LAYER_SIZE / world_size)
    of_whole_parameters = 2 * LAYER_SIZE * math.ceil(LAYERS / world_size)
    if max(state) <= max(of_equal_parts, of_whole_parameters):
        return None
    title = "a rank keeps more than its part of the optimizer's state"
    if min(state) == MOMENTS:
        title = "every rank keeps the optimizer's state of all parameters, as under DDP, so no memory is saved"
    return side_by_side(
        f"{title}: give each rank's AdamW this rank's part of the parameters only; numbers in the state:",
        state,
        all_parameters=MOMENTS,
        a_part=MOMENTS // world_size,
    )


def wrong_numbers(results: list[dict]) -> str | None:
    """A finding about the first thing that is wrong: the gradients before a step, or the weights after it."""
    calls = [len(result["stepped_with"]) for result in results]
    if calls != [STEPS] * len(results):
        title = "ZeRO1.step() has to call step() of this rank's AdamW once, on every rank; its calls:"
        return side_by_side(title, calls, they_should_be=STEPS)
    for step in range(STEPS):
        found = wrong_gradients(results, step) or wrong_weights(results, step)
        if found:
            return f"in step {step + 1} {found}"
    return None


def wrong_gradients(results: list[dict], step: int) -> str | None:
    """A finding about the gradients with which each rank's AdamW has made a step.

    A rank's part may be cut in any way, so its numbers are looked for among those of all parameters.
    """
    world_size = len(results)
    stepped_with = [flat(result["stepped_with"][step]) for result in results]
    if not all(stepped_with):
        title = "an AdamW made a step without gradients, which moves nothing: give each of its parameters a `.grad`"
        return side_by_side(f"{title}; its gradients:", stepped_with)
    own = [flat(result["own"][step]) for result in results]
    mean = flat(results[0]["mean"][step])
    if all(are_among(numbers, mean) for numbers in stepped_with):
        return None
    title = "the gradients with which each rank's AdamW made its step are not the means over the ranks"
    candidates = {
        f"they are the sums over the ranks: divide by the world size. {HARD_TO_SEE}": [scaled(mean, world_size)]
        * world_size,
        "they are each rank's own: average them first, or the other ranks' samples teach this part nothing": own,
    }
    if step:
        earlier = flat(results[0]["mean"][step - 1])
        candidates |= {
            "those of the step before are still in them: zero_grad() has to clear them": [added(mean, earlier)]
            * world_size,
        }
    for sentence, numbers in candidates.items():
        if all(map(are_among, stepped_with, numbers)):
            title = f"{title}; {sentence}"
            break
    had = {f"rank {rank} had": result["own"][step] for rank, result in enumerate(results)}
    shown = [result["stepped_with"][step] for result in results]
    return side_by_side(f"{title}:", shown, **had, their_mean=results[0]["mean"][step])


def wrong_weights(results: list[dict], step: int) -> str | None:
    """A finding about the weights after a step whose gradients were right."""
    after = [result["weights"][step] for result in results]
    expected = results[0]["expected"][step]
    if near(after, [expected] * len(results)):
        return None
    before = results[0]["expected"][step - 1] if step else results[0]["first"]
    numbers = [flat(of_rank) for of_rank in after]
    # For each rank and weight: is it the right one, is it the one of before the step?
    right = [equal_places(of_rank, flat(expected)) for of_rank in numbers]
    old = [equal_places(of_rank, flat(before)) for of_rank in numbers]
    right_or_old = [is_right or is_old for is_right, is_old in zip(flat(right), flat(old), strict=True)]
    known = all(right_or_old)
    on_some_rank = [any(of_ranks) for of_ranks in zip(*right, strict=True)]
    title = "the weights are not those of DDP with AdamW"
    if all(map(all, old)):
        title = "the weights have not moved: what a step writes into a part has to arrive in the parameters of `module`"
    elif known and all(on_some_rank):
        title = (
            "each rank has new numbers in its own part and old ones in the others': after the step the ranks have to"
            " exchange their parts (broadcast by the owner, or all-gather), in the parameters and not in copies"
        )
    elif known:
        title = (
            "some parameters have moved on no rank: either nobody owns them, or another rank's old numbers were sent"
            " over the new ones"
        )
    return side_by_side(f"{title}; the weights:", after, before=before, they_should_be=expected)


def equal_places(left: list[float], right: list[float]) -> list[bool]:
    """For each place: are the two numbers there equal, but for rounding?"""
    return [near(a, b) for a, b in zip(left, right, strict=True)]


def added(left: list[float], right: list[float]) -> list[float]:
    return [a + b for a, b in zip(left, right, strict=True)]


def are_among(numbers: list[float], all_of_them: list[float]) -> bool:
    """True where each number is one of the others, or the zero at the end of a part."""
    allowed = [0.0, *all_of_them]

    def is_allowed(number: float) -> bool:
        return any(near(number, other) for other in allowed)

    return all(map(is_allowed, numbers))
