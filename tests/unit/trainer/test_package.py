"""The package keeps its promises: it has no mixin, and its README names tests that exist."""

import ast
import re
from pathlib import Path

from common import ladder

PACKAGE = ladder.ROOT / "common" / "trainer"


def test_no_class_has_two_parents():
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.ClassDef) or len(node.bases) <= 1, node.name


def test_the_readme_names_tests_that_exist():
    named = re.findall(r"`(test_\w+\.py)(?:::(\w+)|` \((\w+)\))", (PACKAGE / "README.md").read_text())
    assert len(named) > 15
    for file, test, check in named:
        assert f"def {test or 'check_' + check}(" in (Path(__file__).parent / file).read_text(), (file, test, check)
