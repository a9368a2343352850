"""A mistake of a solution: its name, and what was seen of it."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SENTENCES = Path(__file__).with_name("mistakes.toml")


class Mistake(NamedTuple):
    """A mistake that a checker knows.

    Attributes:
        name: its key in `mistakes.toml`, where the sentence for the learner stands.
        where: the number of ranks, the step, and so on.
        details: lines that show the mistake, such as each rank's numbers.
    """

    name: str
    where: str = ""
    details: str = ""

    def at(self, where: str) -> "Mistake":
        """The mistake with a wider place in front of its own, such as the number of ranks in front of the step."""
        return self._replace(where=f"{where}, {self.where}" if self.where else where)

    def with_values(self, what: str, values: Sequence[Any], others: Mapping[str, Any] | None = None) -> "Mistake":
        """The mistake with each rank's value, and, by their titles, the numbers that they are compared with."""
        lines = [f"    {what}:"]
        lines += [f"    rank {rank}: {shown(value)}" for rank, value in enumerate(values)]
        lines += [f"    {title}: {shown(value)}" for title, value in (others or {}).items()]
        return self._replace(details="\n".join(lines))

    def explained(self, exercise: str) -> str:
        """The text for the learner."""
        sentences = tomllib.loads(SENTENCES.read_text())
        sentence = (sentences["every_exercise"] | sentences[exercise])[self.name]
        if self.where:
            sentence = f"{self.where}: {sentence}"
        return f"{sentence}\n{self.details}".rstrip()


class SolutionFailed(Exception):
    """A mistake that keeps the solution from running to its end."""

    def __init__(self, mistake: Mistake) -> None:
        super().__init__(mistake.name)
        self.mistake = mistake


def shown(value: Any) -> str:
    """A short text for numbers and lists of them."""
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return str(value)
