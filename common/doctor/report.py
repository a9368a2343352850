"""The report: it asks all checks, and prints mistakes, what is right, and what could not be examined."""

import textwrap

from common.doctor import data, files, optimizers, random_numbers, replicas, shards, steps
from common.doctor.answers import Answer, Finding, NotExamined, Right
from common.doctor.end import check_end
from common.doctor.record import Record
from common.pitfalls import title

# In the order of the report: a cause comes before its consequences.
CHECKS = {
    "parameters of the optimizer": optimizers.check_parameters,
    "learning rates": optimizers.check_learning_rates,
    "weights": replicas.check_same_weights,
    "training samples": shards.check_training_samples,
    "data sets": shards.check_data_sets,
    "order of the epochs": data.check_orders,
    "random numbers": random_numbers.check_draws,
    "schedule": steps.check_schedule,
    "clipping": steps.check_clipping,
    "accumulation": steps.check_accumulation,
    "evaluation samples": data.check_evaluation_samples,
    "BatchNorm's statistics": replicas.check_same_statistics,
    "files": files.check_writers,
    "saved keys": files.check_keys,
}
# From outside these mistakes look like what somebody may want.
ONLY_YOU_CAN_SEE = ("batch_size_per_process", "mean_of_means", "metrics_not_gathered", "clock_without_wait")
WIDTH = 118


def answers(records: list[Record], patience: float) -> dict[str, Answer]:
    """The answer to each topic."""
    found = {"end of the script": check_end(records, patience)}
    for topic, check in CHECKS.items():
        found[topic] = check(records)
    return found


def findings(found: dict[str, Answer]) -> dict[str, Finding]:
    return {topic: answer for topic, answer in found.items() if isinstance(answer, Finding)}


def not_examined(records: list[Record], found: dict[str, Answer]) -> str | None:
    """Why there was nothing to compare; None where there was."""
    if any(record.backend for record in records):
        return None
    trained = any(record.steps for record in records)
    ends = {record.ended for record in records}
    hung = "stopped" in ends and "crash" not in ends
    if (trained or hung) and isinstance(found["end of the script"], Finding):
        return None
    if trained:
        return "the script made no process group, and each process ran a training of its own"
    return f"no process group and no optimizer step were seen; the script printed last: {records[0].last_line}"


def summary(script: str, records: list[Record], seconds: float) -> str:
    """What ran, in a line."""
    first = records[0]
    processes = len(records)
    parts = [f"{first.steps} optimizer steps"]
    epochs = data.training_epochs(first)
    if epochs and epochs[0].samples:
        per_batch = round(len(epochs[0].samples) / epochs[0].batches)
        parts.append(f"batches of {processes} x {per_batch} = {processes * per_batch} samples")
    group = first.backend or "no process group"
    return f"{script} on {processes} processes ({group}): {', '.join(parts)}, in {seconds:.0f} s"


def lines(records: list[Record], found: dict[str, Answer]) -> list[str]:
    """Each finding with its reason and its remedy, then the rest."""
    text = []
    wrong = findings(found)
    for topic, finding in wrong.items():
        text += _wrapped(f"FOUND {topic}: {finding.text}.")
        text += _wrapped(f"  What to do: {finding.advice}.")
        if finding.pitfall:
            text += _wrapped(f"  `python -m common.pitfalls {finding.pitfall}` shows it: {title(finding.pitfall)}")
        text.append("")
    if wrong:
        text.append(f"Not healthy: {len(wrong)} found.")
    elif any(record.troubles for record in records):
        text.append("Nothing found, but an observer failed, and does not know all.")
    elif isinstance(found["weights"], Right):
        text.append("Healthy: nothing found.")
    else:
        text.append("Nothing found, but the weights were not compared.")
    right = [topic for topic, answer in found.items() if isinstance(answer, Right)]
    others = [f"{topic} ({answer.reason})" for topic, answer in found.items() if isinstance(answer, NotExamined)]
    text += _wrapped(f"Right: {', '.join(right) or 'nothing'}.")
    text += _wrapped(f"Not examined: {', '.join(others) or 'nothing'}.")
    text += _wrapped(f"Only you can see: {', '.join(ONLY_YOU_CAN_SEE)} (`python -m common.pitfalls NAME` shows each).")
    for trouble in sorted({trouble for record in records for trouble in record.troubles}):
        text += _wrapped(f"An observer failed: {trouble}")
    return text


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False)
