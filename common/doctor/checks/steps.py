"""`Record.steps` and `clippings`: all ranks run one script and make such a mistake alike, so rank 0 alone is asked."""

from common.doctor.answers import Answer, Finding, NotExamined, Right
from common.doctor.checks.by_rank import changing_rates
from common.doctor.record import Record

TRAILING_ZEROS = 3  # steps at the end without a learning rate; a schedule may end in one


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
