"""The package keeps its promises: it is short, has no mixin, and its README names tests that exist."""

import ast
import io
import re
import tokenize
from pathlib import Path

from common import ladder

PACKAGE = ladder.ROOT / "common" / "trainer"
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of_code(path: Path) -> int:
    """Lines that are not blank, not comments and not docstrings."""
    source = path.read_text()
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node) is not None:
            code -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(code)


def test_the_package_has_at_most_900_lines_of_code_and_no_file_over_350():
    lengths = {path.name: lines_of_code(path) for path in PACKAGE.glob("*.py")}
    assert max(lengths.values()) <= 350, lengths
    assert sum(lengths.values()) <= 900, lengths


def test_no_class_has_two_parents():
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.ClassDef) or len(node.bases) <= 1, node.name


def test_level_04_has_at_most_70_lines():
    assert len(ladder.story("04_trainer")) <= 70


def test_the_readme_names_tests_that_exist():
    named = re.findall(r"`(test_\w+\.py)(?:::(\w+)|` \((\w+)\))", (PACKAGE / "README.md").read_text())
    assert len(named) > 15
    for file, test, check in named:
        assert f"def {test or 'check_' + check}(" in (Path(__file__).parent / file).read_text(), (file, test, check)
