"""The page of the exercises, which is made of what their modules and starter files say.

Running this module writes the page anew; a test compares the two.
"""

from pathlib import Path

from common.ladder import exercises

PAGE = Path(__file__).parents[1] / "EXERCISES.md"
HEAD = """# Exercises: build it yourself

Here you write the parts of parallel training. A checker runs your code on real
processes and compares its numbers with those of PyTorch. Where
[`common/small`](../small/README.md) has the same part, it compares them with
that part's numbers too. If they differ, it says which idea is wrong and shows
the ranks' numbers side by side.

Run everything from the root of the repository. Each exercise has a file to
begin with, which has the task and gaps. Copy it, fill the gaps and check it:

    cp common/ladder/exercises/starters/average_gradients.py my_average_gradients.py
    python -m common.ladder check average_gradients my_average_gradients.py

A check takes some ten seconds, most of them to start the processes. Code that
is right on one number of ranks is run on another one too. Each rank is as on a
machine of its own. Most of the networks are in float64, so that a difference is
no rounding error: give your own tensors the dtype of those that they belong to.
Code that does not come to an end is stopped after eight seconds, and you are
told in which line each rank was. When a solution has passed, the checker names
the next exercise. `python -m common.ladder check --list` lists them. Solutions
lie in `tests/unit/exercises/solutions`.
"""


def text() -> str:
    """The whole page, in the order of the climb."""
    parts = [HEAD]
    for number, name in enumerate(exercises.NAMES, start=1):
        exercise = exercises.module(name)
        title, _, body = exercises.task(name).partition("\n")
        where = f"About {exercise.MINUTES} minutes. Read first: [{exercise.READ}](../../{exercise.READ})."
        parts.append(f"## {number}. {title.removesuffix('.')}\n\n{where}\n\n{body.strip()}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(text())
    print(f"Written: {PAGE}")
