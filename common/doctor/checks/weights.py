"""Weights: all ranks have the same ones after each step, and the same statistics of BatchNorm in each evaluation."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from common.doctor.checks.alignment import corresponding_steps, no_difference, trained_networks
from common.doctor.checks.contents import spread
from common.doctor.checks.optimizers import have_same_rates
from common.doctor.record import Network, Record, Tensors
from common.doctor.results import Finding, Result, Skipped, overall
from common.weights import max_difference

# Weights are noted after each step up to this one, then after 128, 256, … steps, and where they may be averaged.
EACH_STEP_UNTIL = 64
MAX_NOTED = 128  # steps; once so many are noted, only powers of two follow
NUMBERS_OF_A_TENSOR = 128  # spread over it
TOLERANCE = 1e-6  # a difference counts if it is larger than this part of the tensor's largest finite number
# A script that averages gradients by itself exchanges as many numbers as the network trains, at this part of the steps
# at least: nearly at all of them. One that gathers predictions or losses may do so now and then.
GRADIENTS_ARE_AVERAGED = 0.5
NO_STATISTICS = "no BatchNorm was evaluated on all ranks after the same step"


def note_weights(network: Network, module: nn.Module, record: Record) -> None:
    """Note the weights after the newest step, at the first forward in training that follows it."""
    steps = len(record.steps)
    is_power_of_two = steps & (steps - 1) == 0
    may_be_averaged = has_exchanged(network, record, steps) and len(network.weights) < MAX_NOTED
    if (steps <= EACH_STEP_UNTIL or is_power_of_two or may_be_averaged) and steps not in network.weights:
        network.weights[steps] = some_weights(module)


def has_exchanged(network: Network, record: Record, steps: int) -> bool:
    """True if after a step collectives had as many numbers as the network trains: maybe its weights or gradients."""
    return 0 < network.trained_numbers <= record.exchanged[steps]


def some_weights(module: nn.Module) -> Tensors:
    found = {}
    for name, parameter in module.named_parameters():
        is_whole = not is_lazy(parameter) and not is_shard(name, parameter)
        if is_whole and parameter.is_floating_point() and parameter.numel():
            found[name] = some_numbers(parameter)
    return found


def is_shard(name: str, parameter: nn.Parameter) -> bool:
    """True if this rank holds a shard of the parameter only, as FSDP2 and FSDP1 leave it."""
    return isinstance(parameter, DTensor) or "_fsdp_wrapped_module" in name


def note_statistics(network: Network, module: nn.Module, steps: int) -> None:
    """Note the statistics after a forward: if DDP copies rank 0's, it has done so. An evaluation changes none."""
    if steps in network.statistics:
        return
    found = {}
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and part.running_mean is not None:
            found[f"{name}.running_mean"] = some_numbers(part.running_mean)
            found[f"{name}.running_var"] = some_numbers(part.running_var)
    network.statistics[steps] = found


def some_numbers(tensor: Tensor) -> Tensor:
    # By way of plain numbers: a tensor inside of `torch.func.vmap` fails here, and not where the record is written.
    return torch.tensor(spread(tensor, NUMBERS_OF_A_TENSOR).tolist(), dtype=torch.float64, device="cpu")


def check_same_weights(records: list[Record]) -> Result:
    """Passed if the weights are equal after each step; a Finding if they differ and are never equal again."""
    results = [_judge_weights(networks, records) for networks in trained_networks(records)]
    return overall(results, "no network with the same parameters was called in training mode on all ranks")


def _judge_weights(networks: tuple[Network, ...], records: list[Record]) -> Result:
    by_step = differences_by_step([network.weights for network in networks], records)
    if not by_step:
        return Skipped("no finite weights after a step were seen on all ranks, or no rank has whole parameters")
    apart = [step for step, differences in by_step.items() if differences]
    equal = [step for step, differences in by_step.items() if not differences]
    if not apart:
        return no_difference(records)
    if equal and equal[-1] > apart[0]:
        return Skipped(f"they differ after step {apart[0]}, but are equal again later: they may be averaged")
    text = f"{_in_words(by_step[apart[0]])} after step {apart[0]}"
    return (  # by the first cause that the records show
        judge_wrapper(text, networks)
        or judge_missing_wrapper(text, networks, records[0])
        or judge_other_causes(text, records)
    )


def judge_wrapper(text: str, networks: tuple[Network, ...]) -> Result | None:
    """A finding if the wrapper has other parameters than the network, or does not see all of its forwards."""
    changed = max(len(network.changed) for network in networks)
    if changed:
        text = f"{text}: {changed} parameters are not those that DistributedDataParallel wrapped"
        advice = "move, convert and unfreeze the network first, and wrap it last"
        return Finding(text, advice, pitfall="moved_after_wrapping")
    worst = max(networks, key=lambda network: network.past_wrapper)
    if not worst.past_wrapper:
        return None
    text = f"{text}: {worst.past_wrapper} of {worst.forwards} forwards in training went past DistributedDataParallel"
    return Finding(text, "call the wrapper in training, not its `.module`", pitfall="forward_through_module")


def judge_missing_wrapper(text: str, networks: tuple[Network, ...], record: Record) -> Result | None:
    """A result if no wrapper holds the network, and the script does not average its gradients by itself either."""
    if any(network.wrapped for network in networks):
        return None
    exchanges = [has_exchanged(networks[0], record, step) for step in range(len(record.steps) + 1)]
    if exchanges[-1]:
        return Skipped("they may be averaged after the last step, which no forward in training follows")
    if sum(exchanges) / len(exchanges) >= GRADIENTS_ARE_AVERAGED:
        return None
    text = f"{text}: no DistributedDataParallel holds the network"
    advice = "wrap it, or average the weights by torch.distributed; a stage of a pipeline is meant to differ"
    return Finding(text, advice, pitfall="forward_through_module")


def judge_other_causes(text: str, records: list[Record]) -> Result:
    if not all(map(have_same_rates, corresponding_steps(records))):
        return Skipped("other learning rates make other weights")
    advice = "no further cause was seen: look for weights that ranks begin with, or that one loads after wrapping, "
    return Finding(text, f"{advice}for clipping and updates that not all ranks make, and for `no_sync`")


def check_same_statistics(records: list[Record]) -> Result:
    """Passed if BatchNorm's statistics are equal in each evaluation after a step; a Finding if not."""
    networks_with_batchnorm = [each for each in trained_networks(records) if any(each[0].statistics.values())]
    return overall([_judge_statistics(networks, records) for networks in networks_with_batchnorm], NO_STATISTICS)


def _judge_statistics(networks: tuple[Network, ...], records: list[Record]) -> Result:
    by_step = differences_by_step([network.statistics for network in networks], records)
    if not by_step:
        return Skipped(NO_STATISTICS)
    for step, differences in by_step.items():
        if differences:
            text = f"{_in_words(differences)} in the evaluation after step {step}"
            advice = "broadcast the buffers of rank 0 before an evaluation, or use SyncBatchNorm"
            return Finding(text, advice, pitfall="batchnorm_statistics")
    return no_difference(records)


def differences_by_step(of_ranks: list[dict[int, Tensors]], records: list[Record]) -> dict[int, dict[str, float]]:
    """For each corresponding step after which all ranks have noted tensors: those that differ, and by how much."""
    found = {}
    for step in range(1, len(corresponding_steps(records)) + 1):
        first, *others = [tensors.get(step, {}) for tensors in of_ranks]
        if set(first).intersection(*others):  # else nothing would be compared
            differences = _differences(first, others)
            are_finite = all(tensor.isfinite().all() for tensor in first.values())
            if differences or are_finite:  # equal nans prove nothing: ranks that differed may end in them
                found[step] = differences
    return found


def _differences(first: Tensors, others: list[Tensors]) -> dict[str, float]:
    largest: dict[str, float] = {}
    for name, values in first.items():
        finite = values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        tolerance = TOLERANCE * finite.abs().max().item()
        apart = [max_difference(values, tensors[name]) for tensors in others if name in tensors]
        if max(apart, default=0.0) > tolerance:  # infinite if only one of two numbers is a nan
            largest[name] = max(apart)
    return largest


def _in_words(differences: dict[str, float]) -> str:
    names = ", ".join(list(differences)[:3])
    return f"{len(differences)} tensors differ between the ranks by up to {max(differences.values()):.1e} ({names})"
