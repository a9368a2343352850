"""The report: what was found, and a line on the rest."""

import textwrap

from common.doctor import compare_calls, compare_data, compare_models
from common.doctor.answers import Answer, Finding, Healthy, Unseen
from common.doctor.ends import end
from common.doctor.launch import Rank
from common.pitfalls import title

# The most important first: one that explains another one comes before it.
CHECKS = {
    "parameters of the optimizer": compare_models.optimizers,
    "learning rates": compare_models.learning_rates,
    "weights": compare_models.weights,
    "averages of gradients": compare_models.gradients,
    "training samples": compare_data.shards,
    "order of the epochs": compare_data.orders,
    "random numbers": compare_models.random_numbers,
    "schedule": compare_models.schedule,
    "accumulation": compare_models.accumulation,
    "evaluation samples": compare_data.evaluation,
    "BatchNorm's statistics": compare_models.batchnorm,
    "collectives": compare_calls.collectives,
    "files": compare_calls.saves,
    "saved keys": compare_calls.keys,
}
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
UNKNOWN = "the doctor has seen that it is so, and not what causes it"
PERHAPS = "the doctor has seen no cause but what is found above"
WIDTH = 118


def answers(ranks: list[Rank], patience: float) -> dict[str, Answer]:
    """The answer to each topic."""
    records = [rank.record for rank in ranks]
    found = {"end of the script": end(ranks, patience)}
    for topic, check in CHECKS.items():
        found[topic] = check(records)
    return found


def findings(found: dict[str, Answer]) -> dict[str, Finding]:
    return {topic: answer for topic, answer in found.items() if isinstance(answer, Finding)}


def not_examined(ranks: list[Rank], found: dict[str, Answer]) -> str | None:
    """Why there was nothing to compare; None where there was."""
    if any(rank.record.backend for rank in ranks):
        return None
    ran = any(rank.record.steps or rank.hung for rank in ranks)
    if ran and isinstance(found["end of the script"], Finding):
        return None
    if any(rank.record.steps for rank in ranks):
        return "the script made no process group, and each process ran a training of its own"
    return f"no process group and no optimizer step were seen; the script printed last: {ranks[0].last_line}"


def summary(script: str, ranks: list[Rank], seconds: float) -> str:
    """What ran, in a line."""
    first = ranks[0].record
    parts = [f"{first.steps} optimizer steps"]
    epochs = compare_data.training_passes(first)
    if epochs and epochs[0].samples:
        per_batch = round(len(epochs[0].samples) / epochs[0].batches)
        parts.append(f"batches of {len(ranks)} x {per_batch} = {len(ranks) * per_batch} samples")
        parts.append(f"{len(epochs)} epoch(s), whole or in part")
    group = first.backend or "no process group"
    return f"{script} on {len(ranks)} processes ({group}): {', '.join(parts)}, in {seconds:.0f} s"


def lines(ranks: list[Rank], found: dict[str, Answer], verbose: bool) -> list[str]:
    """Each finding with its reason and its remedy; then the rest, in one line or, if `verbose`, in many."""
    text = []
    wrong = findings(found)
    unknown = UNKNOWN
    for topic, finding in wrong.items():
        text += _wrapped(f"FOUND {topic}: {finding.text}.")
        why = finding.why or (title(finding.pitfall) if finding.pitfall else unknown)
        unknown = PERHAPS
        text += _wrapped(f"  Why: {why.rstrip('.')}.")
        text += _wrapped(f"  What to do: {finding.advice}.")
        if finding.pitfall:
            text.append(f"  `python -m common.pitfalls {finding.pitfall}` shows it.")
        text.append("")
    right = [f"{topic}: {answer.text}" for topic, answer in found.items() if isinstance(answer, Healthy)]
    not_seen = [f"{topic}: {answer.text}" for topic, answer in found.items() if isinstance(answer, Unseen)]
    troubles = {f"what an observer failed on ({trouble})" for rank in ranks for trouble in rank.record.troubles}
    not_seen += [*sorted(troubles), *NEVER]
    if verbose:
        for head, parts in (("Right:", right), ("Not looked at:", not_seen)):
            text.append(head)
            for part in parts:
                text += _wrapped(f"  - {part}")
            text.append("")
    if wrong:
        state = f"Not healthy: {len(wrong)} found"
    elif isinstance(found["weights"], Healthy):
        state = "Healthy: nothing found"
    else:
        state = "Nothing found, but the weights were not compared"
    rest = "" if verbose else " (--verbose lists them)"
    text.append(f"{state}; {len(right)} things are right, and {len(not_seen)} were not looked at{rest}.")
    return text


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False)
