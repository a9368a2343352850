"""`Record.draws`: dropout and augmentation draw other random numbers on each rank."""

from collections import defaultdict

from common.doctor.answers import Answer, Finding, NotExamined, Right, overall
from common.doctor.checks.by_rank import across_ranks
from common.doctor.record import Record


def check_draws(records: list[Record]) -> Answer:
    if any(record.is_split for record in records):
        return NotExamined("on the mesh of the network, ranks may need the same numbers")
    of_ranks = [_states(record) for record in records]
    answers: list[Answer] = []
    for source, generator in of_ranks[0]:
        draws = across_ranks(states[source, generator] for states in of_ranks)
        same = sum(len(set(states)) < len(states) for states in draws)
        if draws and same == len(draws):
            answers.append(
                Finding(
                    f"the first {same} {source} drew the same numbers on two ranks ({generator})",
                    "seed with seed + rank once the network is built",
                    pitfall="same_random_numbers",
                )
            )
        elif draws:
            answers.append(Right())
    return overall(answers, "neither forwards in training nor the reading of batches drew any")


def _states(record: Record) -> dict[tuple[str, str], list[int]]:
    """The states before the draws, by what drew and from which generator."""
    states: dict[tuple[str, str], list[int]] = defaultdict(list)
    for draw in record.draws:
        states[draw.source, draw.generator].append(draw.state)
    return states
