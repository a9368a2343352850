"""Checks of optimizers: they have the networks' parameters, and step alike on all ranks."""

from common.doctor.answers import Answer, Finding, Right, Unseen
from common.doctor.compare_networks import trained
from common.doctor.record import Record, across_ranks, steps_with_different_rates

TRAILING_ZEROS = 3  # steps at the end without a learning rate; a schedule may end in one


def parameters(records: list[Record]) -> Answer:
    if not records[0].steps or not trained(records):
        return Unseen("no optimizer step was seen")
    for record in records:
        missing = record.in_no_optimizer
        if missing and record.in_no_network:
            return Finding(
                f"{record.in_no_network} are of no network; {len(missing)} of the network have gradients "
                f"and are in no optimizer ({', '.join(missing[:3])})",
                "make the optimizer last, from the parameters that are trained",
                pitfall="replaced_parameters",
            )
    return Right()


def learning_rates(records: list[Record]) -> Answer:
    steps = across_ranks(record.learning_rates for record in records)
    if not steps:
        return Unseen("no optimizer step was seen on all ranks")
    different = steps_with_different_rates(records)
    if not different:
        return Right()
    first = different[0]
    rates_of_ranks = []
    for rank, rates in enumerate(steps[first]):
        distinct = " and ".join(f"{rate:.3g}" for rate in dict.fromkeys(rates))
        rates_of_ranks.append(f"rank {rank} has {distinct}")
    text = f"differ at {len(different)} of {len(steps)} steps; at step {first + 1} {', '.join(rates_of_ranks)}"
    changes = [any(rates != record.learning_rates[0] for rates in record.learning_rates) for record in records]
    if changes[0] and not any(changes[1:]):
        text += "; it never changes on another rank than rank 0"
        return Finding(text, "let all ranks step the scheduler", pitfall="schedule_on_rank_0")
    return Finding(text, "give all ranks the same learning rate, and let them step the scheduler equally often")


def schedule(records: list[Record]) -> Answer:
    rates = records[0].learning_rates
    if all(of_step == rates[0] for of_step in rates):
        return Unseen("the learning rate did not change")
    zeros = 0
    for of_step in reversed(rates):
        if any(of_step):
            break
        zeros += 1
    if zeros < TRAILING_ZEROS:
        return Right()
    return Finding(
        f"the learning rate is 0 in the last {zeros} of {len(rates)} steps",
        "write the schedule for as many calls of its `step` as there are",
        pitfall="schedule_too_fast",
    )


def clipping(records: list[Record]) -> Answer:
    """The answer about gradients that are clipped while they are multiplied by the scale of the loss."""
    first = records[0]
    if not first.clippings:
        return Unseen("no gradients were clipped")
    if not first.clipped_scaled:
        return Right()
    return Finding(
        f"{first.clipped_scaled} of {first.clippings} times gradients were clipped that the scale had multiplied",
        "call `scaler.unscale_(optimizer)` between backward and clipping",
    )


def accumulation(records: list[Record]) -> Answer:
    micro_batches = records[0].forwards_of_steps
    networks = trained(records)
    if len(networks) != 1 or len(micro_batches) < 4:
        return Unseen("fewer than four steps of one network were seen")
    if micro_batches[0] < micro_batches[1] == micro_batches[2]:
        return Finding(
            f"steps of {', '.join(map(str, micro_batches[:4]))}, … micro-batches",
            "count micro-batches from 1, and close the last window where the data end",
            pitfall="accumulation_off_by_one",
        )
    return Right()
