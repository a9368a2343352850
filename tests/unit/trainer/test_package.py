"""The page of differences names tests that exist, and all that is missing."""

import re
from dataclasses import fields
from pathlib import Path

from common import ladder, trainer

PACKAGE = ladder.ROOT / "common" / "trainer"


def test_every_deliberate_difference_names_its_kind_and_a_test_that_exists():
    lines = (PACKAGE / "DIFFERENCES.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| A script …")]
    tests = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for row in rows:
        assert "**" in row, f"of which kind is it? {row}"
        named = re.findall(r"`(test_\w+)`", row)
        assert named and all(f"def {name}(" in tests for name in named), row
    assert len(rows) > 25


def test_every_missing_argument_and_method_is_named(transformers):
    _, _, page = (PACKAGE / "DIFFERENCES.md").read_text().partition("## What a program may not expect")
    points = [set(re.findall(r"`(\w+)`", point)) for point in page.split("\n- ")]

    def missing(names_of):
        return names_of(transformers) - names_of(trainer)

    methods = missing(lambda library: {name for name in dir(library.Trainer) if name[0] != "_"})
    arguments = missing(lambda library: {field.name for field in fields(library.TrainingArguments)})
    assert methods and any(methods <= point for point in points)
    assert arguments and any(arguments <= point for point in points)
