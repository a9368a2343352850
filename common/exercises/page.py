"""The page of the exercises, which is made of what their modules and starter files say.

Running this module writes the page anew; a test compares the two.
"""

from pathlib import Path

from common import exercises

PAGE = Path(__file__).with_name("README.md")
HEAD = """# Exercises: build it yourself

Here you write the parts of parallel training. A checker runs your code on real
processes and compares its numbers with those of PyTorch. Where
[`common/small`](../small/README.md) has the same part, it compares them with
that part's numbers too. If they differ, it says which idea is wrong and shows
the ranks' numbers side by side.

Run everything from the root of the repository. Each exercise has a file to
begin with, which has the task and gaps. Copy it, fill the gaps and check it:

    cp common/exercises/starters/average_gradients.py my_average_gradients.py
    python -m common.ladder check average_gradients my_average_gradients.py

A check takes some ten seconds, most of them to start the processes. Code that
is right on one number of ranks is run on another one too. Each rank is as on a
machine of its own. Most of the networks are in float64, so that a difference is
no rounding error: give your own tensors the dtype of those that they belong to.
Code that does not come to an end is stopped after eight seconds, and you are
told in which line each rank was. When a solution has passed, the checker names
the next exercise. `python -m common.ladder check --list` lists them. Solutions
lie in `tests/unit/exercises/solutions`.

| | starter file | what you do | minutes, about | read first |
|--:|---|---|--:|---|"""


def text() -> str:
    """The whole page: a row for each exercise, in the order of the climb. Its task stands in its starter file."""
    rows = []
    for number, name in enumerate(exercises.NAMES, start=1):
        exercise = exercises.module(name)
        title = exercises.task(name).partition("\n")[0].removesuffix(".")
        starter = f"[{name}](starters/{name}.py)"
        rows.append(
            f"| {number} | {starter} | {title} | {exercise.MINUTES} | [{exercise.READ}](../../{exercise.READ}) |"
        )
    return "\n".join([HEAD, *rows, ""])


if __name__ == "__main__":
    PAGE.write_text(text())
    print(f"Written: {PAGE}")
