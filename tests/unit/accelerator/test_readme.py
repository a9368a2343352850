"""The core's README: the tests it names exist, and its files are as short as it says."""

import ast
import io
import re
import tokenize
from pathlib import Path

CORE = Path(__file__).parents[3] / "common/accelerator"
README = (CORE / "README.md").read_text()


def lines_of_code(path):
    """Lines without blanks, comments and docstrings."""
    source = path.read_text()
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    empty = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in empty:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def test_every_deliberate_difference_names_a_test_that_exists():
    rows = [line for line in README.split("## Deliberate differences")[1].splitlines() if line.startswith("| ")][1:]
    folders = Path(__file__).parent, Path(__file__).parents[2] / "faults"
    tests = "\n".join(path.read_text() for folder in folders for path in folder.glob("test_*.py"))
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named and all(f"def {name}(" in tests for name in named), row
    assert len(rows) > 40


def test_the_reading_path_is_six_files_with_as_many_lines_as_the_readme_says():
    path = re.findall(r"^\| \[`(\w+\.py)`\]", README, re.MULTILINE)
    named, lines = re.search(r"^(\w+) files, some ([\d,]+) lines", README, re.MULTILINE).groups()
    assert (named, len(path)) == ("Six", 6)
    assert abs(sum(lines_of_code(CORE / name) for name in path) - int(lines.replace(",", ""))) <= 25


def test_the_core_stays_within_its_budget_of_lines():
    files = {file: lines_of_code(file) for file in CORE.rglob("*.py")}
    assert sum(files.values()) <= 2300
    assert max(files.values()) <= 350, max(files, key=files.get)


def test_files_say_their_idea_in_the_first_line():
    for file in CORE.rglob("*.py"):
        assert file.read_text().startswith('"""') or not file.read_text(), file
