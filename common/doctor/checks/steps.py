"""`Record.steps` and `clippings`: learning rates, schedule, clipping and accumulation.

All but the learning rates are asked of rank 0 alone. The ranks run one script, and make such mistakes alike.
"""

from collections import defaultdict

from common.doctor.answers import Answer, Finding, NotExamined, Right
from common.doctor.checks.alignment import corresponding_steps, no_difference
from common.doctor.record import Record, Step

TRAILING_ZEROS = 3  # steps at the end without a learning rate; a schedule may end in one


def check_learning_rates(records: list[Record]) -> Answer:
    """Right if all ranks have the same learning rates at each step; a Finding if not."""
    steps = corresponding_steps(records)
    if not steps:
        return NotExamined("no optimizer step was seen that all ranks make together")
    different = [number for number, of_ranks in enumerate(steps) if not have_same_rates(of_ranks)]
    if not different:
        return no_difference(records)
    first = different[0]
    rates_by_rank = [f"rank {rank} has {step.learning_rates}" for rank, step in enumerate(steps[first])]
    counted = f"the ranks' learning rates differ at {len(different)} of {len(steps)} steps"
    text = f"{counted}; at step {first + 1} {', '.join(rates_by_rank)}"
    if changing_rates(records[0]) and not any(map(changing_rates, records[1:])):
        text += "; it never changes on another rank than rank 0"
        return Finding(text, "let all ranks step the scheduler", pitfall="schedule_on_rank_0")
    return Finding(text, "give all ranks the same learning rate, and let them step the scheduler equally often")


def check_schedule(records: list[Record]) -> Answer:
    """A Finding if an optimizer has a learning rate of 0 in its last three steps; else Right if a rate changes."""
    changing = changing_rates(records[0])
    if not changing:
        return NotExamined("no change of a learning rate was seen")
    for rates in changing:
        not_zero = [step for step, of_step in enumerate(rates, start=1) if any(rate != 0 for rate in of_step)]
        zeros = len(rates) - max(not_zero, default=0)
        if zeros >= TRAILING_ZEROS:
            return Finding(
                f"the learning rate is 0 in the last {zeros} of {len(rates)} steps",
                "write the schedule for as many calls of its `step` as there are",
                pitfall="schedule_too_fast",
            )
    return Right()


def check_clipping(records: list[Record]) -> Answer:
    """A Finding if gradients were clipped while a loss scale multiplied them; else Right if any were clipped."""
    clippings = records[0].clippings
    if not clippings:
        return NotExamined("rank 0 was not seen to call torch.nn.utils.clip_grad_…")
    scaled = sum(clippings)
    if not scaled:
        return Right()
    return Finding(
        f"{scaled} of {len(clippings)} times gradients were clipped that the scale had multiplied",
        "call `scaler.unscale_(optimizer)` between backward and clipping",
    )


def check_accumulation(records: list[Record]) -> Answer:
    """A Finding if the first step has fewer micro-batches than the next two, which have equally many."""
    first = records[0]
    trained = [network for network in first.networks if network.forwards]
    if len(trained) != 1:
        return NotExamined(f"the micro-batches of one network can be counted, but {len(trained)} were trained")
    # A second optimizer may step after the same forwards: then it has none of its own.
    micro_batches = [step.micro_batches for step in first.steps if step.micro_batches][:3]
    if len(micro_batches) < 3:
        return NotExamined("fewer than three optimizer steps after a forward were seen")
    if micro_batches[0] < micro_batches[1] == micro_batches[2]:
        return Finding(
            f"the steps are of {', '.join(map(str, micro_batches))}, … micro-batches",
            "count micro-batches from 1, and close the last window where the data end",
            pitfall="accumulation_off_by_one",
        )
    return Right()


def have_same_rates(of_ranks: tuple[Step, ...]) -> bool:
    return all(step.learning_rates == of_ranks[0].learning_rates for step in of_ranks)


def changing_rates(record: Record) -> list[list[list[float | None]]]:
    """For each optimizer whose learning rates change: those of its parameter groups, step by step."""
    by_optimizer = defaultdict(list)
    for step in record.steps:
        by_optimizer[step.optimizer].append(step.learning_rates)
    return [rates for rates in by_optimizer.values() if any(of_step != rates[0] for of_step in rates)]
