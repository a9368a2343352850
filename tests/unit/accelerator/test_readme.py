"""The core's pages: the tests and the files that it names exist, and every file says what it is for."""

import re
from pathlib import Path

CORE = Path(__file__).parents[3] / "common/accelerator"
README = (CORE / "README.md").read_text()


def test_every_deliberate_difference_names_its_kind_and_a_test_that_exists():
    lines = (CORE / "DIFFERENCES.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| A script …")]
    tests_of_all = Path(__file__).parents[2]
    folders = tests_of_all / "unit", tests_of_all / "unit" / "accelerator", tests_of_all / "faults"
    tests = "\n".join(path.read_text() for folder in folders for path in folder.glob("test_*.py"))
    for row in rows:
        assert "**" in row, f"of which kind is it? {row}"
        named = re.findall(r"`(test_\w+)`", row)
        assert named and all(f"def {name}(" in tests for name in named), row
    assert rows, "the tables are not what this test looks for"


def test_the_files_that_the_differences_are_grouped_by_are_there():
    headings = re.findall(r"^## (.*)$", (CORE / "DIFFERENCES.md").read_text(), re.MULTILINE)
    for heading in headings:
        files = re.findall(r"`([\w/]+\.py|\w+/)`", heading)
        assert files and all((CORE / name).exists() for name in files), heading


def test_the_files_of_the_reading_path_are_there():
    path = re.findall(r"^\| \[`(\w+\.py)`\]", README, re.MULTILINE)
    assert path and all((CORE / name).is_file() for name in path)


def test_files_say_their_idea_in_the_first_line():
    for file in CORE.rglob("*.py"):
        assert file.read_text().startswith('"""') or not file.read_text(), file
