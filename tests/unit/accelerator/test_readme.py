"""The core's pages: the files that they name exist, and every file says what it is for."""

import re
from pathlib import Path

CORE = Path(__file__).parents[3] / "common/accelerator"
README = (CORE / "README.md").read_text()


def test_every_deliberate_difference_names_its_kind_and_a_test():
    """That the tests exist shows `tests/docs/test_readmes.py`."""
    lines = (CORE / "DIFFERENCES.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| A script …")]
    assert rows, "the tables are not what this test looks for"
    for row in rows:
        assert "**" in row, f"of which kind is it? {row}"
        assert re.search(r"`test_\w+`", row), row


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
