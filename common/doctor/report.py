"""The report: every answer, what was not looked at, and a verdict in three lines."""

import textwrap

from common.doctor import compare_calls, compare_data, compare_models
from common.doctor.answers import Answer, Finding, Healthy, Unseen
from common.doctor.ends import end
from common.doctor.launch import Rank
from common.doctor.record import Record
from common.pitfalls import title

# The most important first: one that explains another one comes before it.
CHECKS = (
    compare_models.optimizers,
    compare_models.learning_rates,
    compare_models.weights,
    compare_models.gradients,
    compare_data.shards,
    compare_data.orders,
    compare_models.random_numbers,
    compare_models.schedule,
    compare_models.accumulation,
    compare_data.evaluation,
    compare_models.batchnorm,
    compare_calls.collectives,
    compare_calls.saves,
    compare_calls.keys,
)
# From outside nobody can tell these from what is wanted.
NEVER = (
    "metrics of one rank taken for those of all (metrics_not_gathered)",
    "a batch size per process taken for the global one (batch_size_per_process): the first line has both",
    "means over unequal batches (mean_of_means)",
    "the scale of the loss: DistributedDataParallel averages, and a loss divided by the number of ranks is too small",
    "gradients that the script reduces in a buffer of its own",
    "a loss that compares the samples of a batch: each rank compares those of its own shard only",
    "clocks (clock_without_wait)",
    "random numbers in the workers of a DataLoader, and those that the script draws itself, as the noise of a GAN",
    "files that torch.save does not write",
)
UNKNOWN = "the doctor has seen that it is so, and not what causes it."
WIDTH = 118
TOPIC = 30


def answers(ranks: list[Rank], patience: float) -> list[Answer]:
    records = [rank.record for rank in ranks]
    return [end(ranks, patience), *(check(records) for check in CHECKS)]


def alone(records: list[Record]) -> bool:
    """No rank made a process group: each ran a training of its own."""
    return all(record.backend is None for record in records)


def summary(script: str, ranks: list[Rank], seconds: float) -> str:
    """What ran, in a line."""
    records = [rank.record for rank in ranks]
    first = records[0]
    parts = [f"{first.steps} optimizer steps"]
    epochs = compare_data.training_passes(first)
    if epochs and epochs[0].samples:
        per_batch = round(len(epochs[0].samples) / epochs[0].batches)
        parts.append(f"batches of {len(records)} x {per_batch} = {len(records) * per_batch} samples")
        parts.append(f"{len(epochs)} epoch(s), whole or in part")
    group = first.backend or "no process group"
    return f"{script} on {len(records)} processes ({group}): {', '.join(parts)}, in {seconds:.0f} s"


def lines(found: list[Answer], records: list[Record]) -> list[str]:
    """The answers, findings first."""
    text = []
    for answer in found:
        if isinstance(answer, Finding):
            text += _row("FOUND", answer.topic, answer.text)
            if answer.pitfall:
                text += _row("", "", f"read common/pitfalls/{answer.pitfall}.py")
    for answer in found:
        if isinstance(answer, Healthy):
            text += _row("well", answer.topic, answer.text)
    unseen = [f"{answer.topic}: {answer.text}" for answer in found if isinstance(answer, Unseen)]
    troubles = [f"what an observer failed on ({trouble})" for record in records for trouble in record.troubles]
    text += ["", "Not looked at:"]
    for part in [*unseen, *dict.fromkeys(troubles), *NEVER]:
        text += textwrap.wrap(part, WIDTH, initial_indent="  - ", subsequent_indent="    ")
    return text


def _row(mark: str, topic: str, text: str) -> list[str]:
    head = f"{mark:<6}{topic:<{TOPIC}}"
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


def verdict(found: list[Answer], processes: int) -> list[str]:
    """Healthy or the most important finding, why, and what to do."""
    findings = [answer for answer in found if isinstance(answer, Finding)]
    if findings:
        worst = findings[0]
        more = f" ({len(findings) - 1} more above)" if len(findings) > 1 else ""
        why = worst.why or (title(worst.pitfall) if worst.pitfall else UNKNOWN)
        see = f"; `python -m common.pitfalls {worst.pitfall}` shows it" if worst.pitfall else ""
        return [f"Not healthy: {worst.topic}: {worst.text}{more}.", f"Why: {why}", f"What to do: {worst.advice}{see}."]
    weights = next(answer for answer in found if answer.topic == "weights")
    samples = next(answer for answer in found if answer.topic == "training samples")
    healthy = sum(isinstance(answer, Healthy) for answer in found)
    state = "Healthy" if isinstance(weights, Healthy) else "Nothing found, but little seen"
    return [
        f"{state}: {healthy} things were looked at on {processes} processes, and none is wrong.",
        f"Why: the weights: {weights.text}; training samples: {samples.text}.",
        "What to do: read what was not looked at; a longer run, with an evaluation and two epochs, shows more.",
    ]


def verdict_alone(records: list[Record]) -> list[str]:
    processes = len(records)
    if not any(record.steps for record in records):
        return [
            "Not examined: the script trained nothing: no optimizer step and no process group were seen.",
            "Why: the doctor compares what ranks do while they train.",
            "What to do: give the doctor the script that trains, and the arguments with which it does.",
        ]
    return [
        f"One process: the script made no process group, so that {processes} processes ran {processes} trainings.",
        "Why: that is right for a script of level 00 or 01, and there is nothing to compare.",
        "What to do: nothing; or go on to level 02, as 00_single_gpu/FROM_YOUR_SCRIPT.md describes.",
    ]


def verdict_of_refusal(last_line: str) -> list[str]:
    return [
        f"Not examined: the script left before it made a process group; it printed: {last_line}",
        "Why: a script of level 00 or 01 is one process, and has no ranks to compare.",
        "What to do: nothing, if it is one of those; else give it what it asks for, and call the doctor again.",
    ]


def verdict_of_launcher() -> list[str]:
    return [
        "Not started: the script starts its own processes with torch.multiprocessing.",
        "Why: the doctor starts one process for each rank, as torchrun does, and tells it its rank.",
        "What to do: give the doctor a script that reads RANK and WORLD_SIZE, and is started by torchrun.",
    ]
