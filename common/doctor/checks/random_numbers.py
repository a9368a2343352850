"""`Record.draws`: dropout and augmentation draw other random numbers on each rank."""

from common.doctor.answers import Answer, Finding, NotExamined, Right
from common.doctor.checks.alignment import across_ranks, trained_networks
from common.doctor.record import Record


def check_draws(records: list[Record]) -> Answer:
    """A Finding if at all draws of a source two ranks have the same generator; else Right if there were draws."""
    if any(record.is_split for record in records) or not trained_networks(records):
        return NotExamined("ranks that do not train one and the same network, or share it out, may need equal numbers")
    answer: Answer = NotExamined("no draw was seen in training forwards or in batches, and loader workers draw unseen")
    for source, generator in records[0].draws:
        draws = across_ranks(record.draws.get((source, generator), []) for record in records)
        same = sum(len(set(states)) < len(states) for states in draws)
        if draws and same == len(draws):
            return Finding(
                f"the first {same} {source} after a step drew the same numbers on two ranks ({generator})",
                "seed with seed + rank once the network is built",
                pitfall="same_random_numbers",
            )
        if draws:
            answer = Right()
    return answer
