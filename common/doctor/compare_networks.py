"""Checks of networks: the ranks must be replicas of each other, but draw their own random numbers."""

from typing import NamedTuple

from torch import Tensor

from common.doctor.answers import Answer, Finding, Right, Unseen, overall
from common.doctor.record import Network, Record, across_ranks, steps_with_different_rates
from common.weights import distance

TOLERANCE = 1e-6  # of the largest finite number of a tensor; ranks that average have equal bits on CPUs

Tensors = dict[str, Tensor]


class Difference(NamedTuple):
    """The tensors of rank 0 that are others on another rank."""

    rank: int  # the other one
    names: list[str]
    compared: int  # tensors, different or not
    farthest: float  # the largest distance of two numbers; infinite if only one of them is a nan

    def __str__(self) -> str:
        count = f"{len(self.names)} of {self.compared} tensors by up to {self.farthest:.1e}"
        return f"rank 0 and {self.rank} differ in {count} ({', '.join(self.names[:3])})"


def difference(of_ranks: list[Tensors]) -> Difference | None:
    """The difference between rank 0 and the first rank that has one."""
    of_rank_0 = of_ranks[0]
    for rank, tensors in enumerate(of_ranks[1:], 1):
        distances = {}
        for name, values in of_rank_0.items():
            if name not in tensors or tensors[name].shape != values.shape or not values.numel():
                continue
            apart = distance(values, tensors[name])
            finite = values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            if apart > TOLERANCE * finite.abs().max().item():
                distances[name] = apart
        if distances:
            return Difference(rank, list(distances), len(of_rank_0), max(distances.values()))
    return None


def differences(noted: list[dict[int, Tensors]]) -> dict[int, Difference | None]:
    """The difference after each number of steps after which all ranks have noted tensors."""
    found = {}
    for step in sorted(noted[0]):
        tensors = [of_rank.get(step) for of_rank in noted]
        if all(tensors):
            found[step] = difference(tensors)
    return found


def trained(records: list[Record]) -> list[tuple[Network, ...]]:
    """The networks that all ranks have trained: for each the observations of all ranks."""
    of_ranks = [[network for network in record.networks if network.forwards] for record in records]
    same = []
    for networks in across_ranks(of_ranks):
        shapes = {(network.kind, network.parameter_count) for network in networks}
        if len(shapes) == 1:
            same.append(networks)
    return same


def weights(records: list[Record]) -> Answer:
    same_rates = not steps_with_different_rates(records)
    answers = [_weights_of(of_ranks, same_rates) for of_ranks in trained(records)]
    return overall(answers, "no network was trained on all ranks")


def _weights_of(of_ranks: tuple[Network, ...], same_rates: bool) -> Answer:
    by_step = differences([network.weights for network in of_ranks])
    before_training = by_step.pop(0, None)
    if not by_step:
        return Unseen("no optimizer step was seen on all ranks, or no rank has whole parameters")
    steps_apart = [step for step, found in by_step.items() if found]
    if not steps_apart:
        return Right()
    first = steps_apart[0]
    # Where only every n-th step averages the weights, they come together again.
    together_again = any(step > first and found is None for step, found in by_step.items())
    if together_again:
        return Right()
    text = f"{by_step[first]} after step {first}"
    finding = _cause_of(text, before_training, of_ranks)
    if finding is None and not same_rates:
        return Unseen("other learning rates make other weights")
    return finding or Finding(
        text, "no further cause was seen: look for `no_sync`, and for updates that not all ranks make"
    )


def _cause_of(text: str, before_training: Difference | None, of_ranks: tuple[Network, ...]) -> Finding | None:
    """The finding with its cause, where one was observed."""
    changed = max(len(network.changed) for network in of_ranks)
    if changed:
        return Finding(
            f"{text}: {changed} parameters are not those that DistributedDataParallel wrapped",
            "move, convert and unfreeze the network first, and wrap it last",
            pitfall="moved_after_wrapping",
        )
    worst = max(of_ranks, key=lambda network: network.past_wrapper)
    if worst.past_wrapper:
        past = f"{worst.past_wrapper} of {worst.forwards} forwards in training went past DistributedDataParallel"
        return Finding(
            f"{text}: {past}", "call the wrapper in training, not its `.module`", pitfall="forward_through_module"
        )
    if not any(network.wrapped for network in of_ranks):
        return Finding(
            f"{text}: no DistributedDataParallel holds the network",
            "wrap it, and train the wrapper: that copies rank 0's weights, and averages the gradients",
            pitfall="forward_through_module",
        )
    if before_training:
        return Finding(
            f"{before_training} before the first step, though DistributedDataParallel holds the network",
            "load and initialise weights before wrapping, or on all ranks alike",
        )
    return None


def batchnorm(records: list[Record]) -> Answer:
    return overall(map(_statistics_of, trained(records)), "no BatchNorm was evaluated on several ranks")


def _statistics_of(of_ranks: tuple[Network, ...]) -> Answer:
    by_step = differences([network.statistics for network in of_ranks])
    by_step.pop(0, None)
    if not by_step:
        return Unseen("no BatchNorm was evaluated on several ranks")
    for step, found in by_step.items():
        if found:
            return Finding(
                f"{found} in the evaluation after step {step}",
                "broadcast the buffers of rank 0 before an evaluation, or use SyncBatchNorm",
                pitfall="batchnorm_statistics",
            )
    return Right()


def random_numbers(records: list[Record]) -> Answer:
    draws_of_ranks = {
        "forwards in training": [record.forward_draws for record in records],
        "batches": [record.batch_draws for record in records],
    }
    answers = []
    for source, of_ranks in draws_of_ranks.items():
        for generator in of_ranks[0]:
            draws = across_ranks(of_rank.get(generator, []) for of_rank in of_ranks)
            if draws:
                answers.append(_draws_of(generator, source, draws))
    return overall(answers, "neither forwards in training nor the reading of batches drew any")


def _draws_of(generator: str, source: str, draws: list[tuple[int, ...]]) -> Answer:
    """One answer about a generator: `draws` has its states on all ranks, before each draw."""
    same = sum(state in of_others for state, *of_others in draws)
    if same < len(draws):
        return Right()
    return Finding(
        f"{same} of {len(draws)} {source} drew the same numbers on rank 0 and another one ({generator})",
        "seed with seed + rank once the network is built",
        pitfall="same_random_numbers",
    )
