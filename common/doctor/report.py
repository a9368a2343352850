"""The report: mistakes, what is right, what could not be examined, and the exit code that says it in short."""

import textwrap

from common.doctor.checks import END, OF_HEALTH, ONLY_YOU_CAN_SEE
from common.doctor.checks.epochs import has_forwards, size_of
from common.doctor.record import Record
from common.doctor.results import Finding, Passed, Result, Skipped
from common.pitfalls import title


def findings(results: dict[str, Result]) -> dict[str, Finding]:
    return {topic: result for topic, result in results.items() if isinstance(result, Finding)}


def summary(script: str, records: list[Record], seconds: float) -> str:
    first = next((record for record in records if record.backend), records[0])  # rank 0 may have left no record
    trained = [[epoch for epoch in record.epochs if has_forwards(epoch)] for record in records]
    sizes = [str(size_of(epochs[0].batches[0])) for epochs in trained if epochs]
    seen = f"optimizer steps: {len(first.steps)}; samples in the first batches: {', '.join(sizes) or 'none'}"
    return f"{script} on {len(records)} processes ({first.backend or 'no process group'}) in {seconds:.0f} s; {seen}"


def lines(results: dict[str, Result], records: list[Record]) -> list[str]:
    text = []
    for topic, finding in findings(results).items():
        text += _wrapped(f"FOUND {topic}: {finding.text}.")
        text += _wrapped(f"  What to do: {finding.advice}.")
        if finding.pitfall:
            text += _wrapped(f"  `python -m common.pitfalls {finding.pitfall}` shows it: {title(finding.pitfall)}")
        text.append("")
    text.append(_verdict(results, records))
    right = [topic for topic, result in results.items() if isinstance(result, Passed)]
    others = [f"{topic} ({result.reason})" for topic, result in results.items() if isinstance(result, Skipped)]
    has_trained = any(record.steps for record in records)
    if END in findings(results) and not has_trained and not has_failed(results, records):
        others = ["all the rest, because no optimizer step was seen before the end"]
    text += _wrapped(f"Right: {', '.join(right) or 'nothing'}.")
    text += _wrapped(f"Not examined: {', '.join(others) or 'nothing'}.")
    text += _wrapped(f"Only you can see: {', '.join(ONLY_YOU_CAN_SEE)} (`python -m common.pitfalls NAME` shows each).")
    errors = {place: error for record in records for place, error in record.observer_errors.items()}
    for place, error in errors.items():
        text += _wrapped(f"An observer failed: {place}: {error}")
    return text


def has_failed(results: dict[str, Result], records: list[Record]) -> bool:
    of_checks = any(isinstance(result, Skipped) and result.failed for result in results.values())
    return of_checks or any(record.observer_errors for record in records)


def exit_code(results: dict[str, Result], records: list[Record]) -> int:
    """1 after a finding; else 2 if nothing but the end is right, or a part of the doctor failed; else 0."""
    if findings(results):
        return 1
    is_right = any(isinstance(result, Passed) for topic, result in results.items() if topic != END)
    return 0 if is_right and not has_failed(results, records) else 2


def _verdict(results: dict[str, Result], records: list[Record]) -> str:
    found = len(findings(results))
    if found:
        return f"Not healthy: {found} found."
    if has_failed(results, records):
        return "Nothing found, but an observer or a check failed."
    if all(isinstance(results[topic], Passed) for topic in OF_HEALTH):
        return "Healthy: nothing found."
    return f"Nothing found, but not all {' and '.join(OF_HEALTH)} were examined."


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, width=118, subsequent_indent="    ", break_on_hyphens=False)
