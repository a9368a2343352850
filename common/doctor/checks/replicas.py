"""Replicas: after each step all ranks have the same weights, and in each evaluation the same BatchNorm statistics."""

from typing import NamedTuple

from common.doctor.answers import Answer, Finding, NotExamined, Right, overall
from common.doctor.checks.by_rank import steps_are_paired, steps_with_different_rates, trained_networks
from common.doctor.record import Network, Record, Tensors
from common.weights import distance

# A difference counts if it is larger than this part of the tensor's largest finite number.
# On CPUs ranks that average have equal bits.
TOLERANCE = 1e-6
NO_STATISTICS = "no BatchNorm was evaluated on several ranks"


def check_same_weights(records: list[Record]) -> Answer:
    if not steps_are_paired(records):
        return NotExamined("the ranks made different numbers of optimizer steps")
    if steps_with_different_rates(records):
        return NotExamined("other learning rates make other weights")
    answers = [_weights(networks) for networks in trained_networks(records)]
    return overall(answers, "no network was trained on all ranks")


def _weights(networks: tuple[Network, ...]) -> Answer:
    by_step = differences_by_step([network.weights for network in networks])
    if not by_step:
        return NotExamined("no optimizer step was seen on all ranks, or no rank has whole parameters")
    different = [step for step, difference in by_step.items() if difference is not None]
    if not different:
        return Right()
    first = different[0]
    for step in by_step:
        if step > first and step not in different and _are_finite(networks[0].weights[step]):
            return Right()  # as where only every n-th step averages the weights
    return _with_cause(f"{by_step[first].text()} after step {first}", networks)


def _are_finite(weights: Tensors) -> bool:
    """False as well where ranks that differed have all ended in nans, which are equal and wrong."""
    return all(tensor.isfinite().all() for tensor in weights.values())


def _with_cause(text: str, networks: tuple[Network, ...]) -> Finding:
    """The finding that the weights differ, with the cause if one was observed."""
    changed = max(len(network.changed) for network in networks)
    if changed:
        return Finding(
            f"{text}: {changed} parameters are not those that DistributedDataParallel wrapped",
            "move, convert and unfreeze the network first, and wrap it last",
            pitfall="moved_after_wrapping",
        )
    worst = max(networks, key=lambda network: network.past_wrapper)
    if worst.past_wrapper:
        past = f"{worst.past_wrapper} of {worst.forwards} forwards in training went past DistributedDataParallel"
        return Finding(
            f"{text}: {past}", "call the wrapper in training, not its `.module`", pitfall="forward_through_module"
        )
    if not any(network.wrapped for network in networks):
        return Finding(
            f"{text}: no DistributedDataParallel holds the network",
            "wrap it, and train the wrapper: that copies rank 0's weights, and averages the gradients",
            pitfall="forward_through_module",
        )
    return Finding(
        text,
        "no further cause was seen: look for weights that one rank loads after wrapping, for `no_sync`, and for "
        "updates that not all ranks make",
    )


def check_same_statistics(records: list[Record]) -> Answer:
    answers = [_statistics(networks) for networks in trained_networks(records)]
    return overall(answers, NO_STATISTICS)


def _statistics(networks: tuple[Network, ...]) -> Answer:
    by_step = differences_by_step([network.statistics for network in networks])
    by_step.pop(0, None)  # nobody has trained
    if not by_step:
        return NotExamined(NO_STATISTICS)
    for step, difference in by_step.items():
        if difference is not None:
            return Finding(
                f"{difference.text()} in the evaluation after step {step}",
                "broadcast the buffers of rank 0 before an evaluation, or use SyncBatchNorm",
                pitfall="batchnorm_statistics",
            )
    return Right()


class Difference(NamedTuple):
    """The tensors of one rank that differ from those of rank 0."""

    rank: int
    largest_by_name: dict[str, float]  # the largest difference of two numbers, by the tensor's name
    tensors: int  # the number of all tensors, equal ones included

    def text(self) -> str:
        """For example "rank 0 and 1 differ in 2 of 8 tensors by up to 1.0e-02 (weight, bias)"."""
        names = list(self.largest_by_name)
        largest = max(self.largest_by_name.values())
        count = f"{len(names)} of {self.tensors} tensors by up to {largest:.1e}"
        return f"rank 0 and {self.rank} differ in {count} ({', '.join(names[:3])})"


def differences_by_step(of_ranks: list[dict[int, Tensors]]) -> dict[int, Difference | None]:
    """The difference after each number of steps for which all ranks have noted tensors; None if they are the same."""
    found = {}
    for step in sorted(of_ranks[0]):
        by_rank = [tensors.get(step) for tensors in of_ranks]
        if all(by_rank):
            found[step] = _difference(by_rank)
    return found


def _difference(by_rank: list[Tensors]) -> Difference | None:
    """The difference between rank 0 and the first rank with other tensors."""
    first = by_rank[0]
    for rank, tensors in enumerate(by_rank[1:], 1):
        largest_by_name = {}
        for name, values in first.items():
            if name not in tensors or tensors[name].shape != values.shape or not values.numel():
                continue
            largest = distance(values, tensors[name])  # infinite if only one of two numbers is a nan
            finite = values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            if largest > TOLERANCE * finite.abs().max().item():
                largest_by_name[name] = largest
        if largest_by_name:
            return Difference(rank, largest_by_name, len(first))
    return None
