"""`Record.steps`: the optimizers have the networks' parameters, and step alike on all ranks."""

from common.doctor.answers import Answer, Finding, NotExamined, Right
from common.doctor.checks.by_rank import changing_rates, corresponding_steps, have_same_rates, no_difference
from common.doctor.record import Record


def check_parameters(records: list[Record]) -> Answer:
    """A Finding if the optimizers lack parameters of the networks, and have others instead; else Right.

    Either alone may be meant: a part that is frozen by leaving it out, or a parameter that no network holds. Both
    together are a part that was replaced: the optimizer has the old parameters, and the network the new ones.
    """
    if not any(record.steps and record.networks for record in records):
        return NotExamined("no optimizer step of a network was seen")
    for record in records:
        untrained = record.trained_in_no_optimizer
        if record.optimized_in_no_network and untrained:
            return Finding(
                f"{record.optimized_in_no_network} parameters of the optimizers are of no network, and "
                f"{len(untrained)} parameters of the networks have gradients and are in no optimizer "
                f"({', '.join(untrained[:3])})",
                "make the optimizer last, from the parameters that are trained",
                pitfall="optimizer_made_first" if record.is_sharded else "replaced_parameters",
            )
    return Right()


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
