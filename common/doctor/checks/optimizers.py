"""`Record.trained_in_no_optimizer`: the optimizers have the parameters of the networks."""

from common.doctor.answers import Answer, Finding, NotExamined, Right
from common.doctor.record import Record


def check_parameters(records: list[Record]) -> Answer:
    """A Finding if the optimizers lack parameters of the networks, and have others instead; else Right.

    Either alone may be meant: a part that is frozen by leaving it out, or a parameter that no network holds. Both
    together are a part that was replaced: the optimizer has the old parameters, and the network the new ones.
    """
    has_trained = [record.steps and any(network.forwards for network in record.networks) for record in records]
    if not any(has_trained):
        return NotExamined("no optimizer step after a training forward was seen")
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
