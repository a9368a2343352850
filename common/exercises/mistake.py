"""A mistake of a solution: its name, and what was seen of it."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

SENTENCES = Path(__file__).with_name("mistakes.toml")


class Mistake(NamedTuple):
    """A mistake that a checker knows.

    Attributes:
        name: in `mistakes.toml`, which has a sentence for the learner.
        where: the number of ranks, the step, and the like.
        details: lines that show it, such as numbers.
    """

    name: str
    where: str = ""
    details: str = ""

    def at(self, where: str) -> "Mistake":
        return self._replace(where=f"{where}, {self.where}" if self.where else where)

    def shown(self, what: str, values: Sequence[Any], **others: Any) -> "Mistake":
        """The mistake with each rank's value, and what they are compared with."""
        lines = [f"    {what}:"]
        lines += [f"    rank {rank}: {shown(value)}" for rank, value in enumerate(values)]
        lines += [f"    {name.replace('_', ' ')}: {shown(value)}" for name, value in others.items()]
        return self._replace(details="\n".join(lines))

    def explained(self, exercise: str) -> str:
        """What the learner is told."""
        sentences = tomllib.loads(SENTENCES.read_text())
        sentence = (sentences["every_exercise"] | sentences[exercise])[self.name]
        if self.where:
            sentence = f"{self.where}: {sentence}"
        return f"{sentence}\n{self.details}".rstrip()


class SolutionFailed(Exception):
    """The solution has a mistake by which it could not be run to its end."""

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
