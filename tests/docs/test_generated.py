"""The parts of pages that a program writes are fresh, and the diffs among them have what is new in a level."""

import re
import sys

import pytest

from benchmarks.report import page_tables, readmes
from common import ladder
from tests.docs.pages import name

GENERATED = readmes.readmes()


@pytest.mark.parametrize("path", GENERATED, ids=name)
def test_the_generated_parts_are_fresh(path):
    assert path.read_text() == readmes.renewed(path.read_text())


def test_a_part_that_has_drifted_is_written_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ladder, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["readmes"])
    page = tmp_path / "README.md"
    text = "By hand.\n\n<!-- devices -->\n{}\n<!-- /devices -->\n\nBy hand, too.\n"
    page.write_text(text.format("| an older table |"))
    for printed in ("README.md is written again\n", ""):
        readmes.main()
        assert capsys.readouterr().out == printed
        assert page.read_text() == text.format(page_tables.table_of_devices())


@pytest.mark.parametrize(
    "before, level",
    [
        ("00_single_gpu", "01_data_parallel"),
        ("00_single_gpu", "02_ddp_raw"),
        ("02_ddp_raw", "03_accelerate"),
        ("03_accelerate", "04_trainer"),
    ],
)
def test_a_page_shows_a_diff_with_all_new_lines_but_imports(before, level):
    page = ladder.ROOT / level / "README.md"
    assert page in GENERATED
    assert re.search(rf"^<!-- (diff|added) {before[:2]} {level[:2]} -->$", page.read_text(), re.MULTILINE)
    shown = {line[2:] for line in readmes.diff(before, level).splitlines() if line.startswith("+ ")}
    added = set(ladder.lines_below_docstring(level)) - set(ladder.lines_below_docstring(before))
    new = {line for line in added if not line.startswith(("import ", "from "))}
    assert new
    assert new <= shown
