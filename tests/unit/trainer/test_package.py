"""The page of differences names tests that exist."""

import re
from pathlib import Path

from common import ladder

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
