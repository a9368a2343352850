"""The core's README: the tests and the files that it names exist, and every file says what it is for."""

import re
from pathlib import Path

CORE = Path(__file__).parents[3] / "common/accelerator"
README = (CORE / "README.md").read_text()


def test_every_deliberate_difference_names_a_test_that_exists():
    rows = [line for line in README.split("## Deliberate differences")[1].splitlines() if line.startswith("| ")][1:]
    folders = Path(__file__).parent, Path(__file__).parents[2] / "faults"
    tests = "\n".join(path.read_text() for folder in folders for path in folder.glob("test_*.py"))
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named and all(f"def {name}(" in tests for name in named), row
    assert rows, "the table is not where this test looks for it"


def test_the_files_of_the_reading_path_are_there():
    path = re.findall(r"^\| \[`(\w+\.py)`\]", README, re.MULTILINE)
    assert path and all((CORE / name).is_file() for name in path)


def test_files_say_their_idea_in_the_first_line():
    for file in CORE.rglob("*.py"):
        assert file.read_text().startswith('"""') or not file.read_text(), file
