"""Random numbers: dropout and augmentation draw others on each rank."""

from collections import defaultdict

from common.doctor.answers import Answer, Finding, Right, overall
from common.doctor.checks.by_rank import across_ranks
from common.doctor.record import Record


def check_draws(records: list[Record]) -> Answer:
    of_ranks = [_states(record) for record in records]
    answers = []
    for source, generator in of_ranks[0]:
        states = across_ranks(of_rank[source, generator] for of_rank in of_ranks)
        same = sum(state in others for state, *others in states)
        if states:
            answers.append(_answer(source, generator, same, len(states)))
    return overall(answers, "neither forwards in training nor the reading of batches drew any")


def _states(record: Record) -> dict[tuple[str, str], list[int]]:
    """The states before the draws, by what drew and from which generator."""
    states: dict[tuple[str, str], list[int]] = defaultdict(list)
    for draw in record.draws:
        states[draw.source, draw.generator].append(draw.state)
    return states


def _answer(source: str, generator: str, same: int, count: int) -> Answer:
    if same < count:
        return Right()
    return Finding(
        f"all {count} {source} drew the same numbers on rank 0 and another one ({generator})",
        "seed with seed + rank once the network is built",
        pitfall="same_random_numbers",
    )
