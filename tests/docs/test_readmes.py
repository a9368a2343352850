"""The pages against what is there: links, files, tests, diffs, and recorded numbers."""

import ast
import re
import sys
from itertools import pairwise

import pytest

from benchmarks.report import page_tables, readmes
from benchmarks.report.rows import speed_ups
from common import ladder
from common.eval_sampler import DistributedEvalSampler
from tests.docs.pages import MODULES, PAGES, name, table_rows

GENERATED = readmes.readmes()
# "](target)" of a link, "[label]: target", and <img src="target">.
TARGET = re.compile(r'(?:\]\(|\]: |src=")([^)"\s]+)')
# "[label]: target"
DEFINITION = re.compile(r"^\[([^\]]+)\]: \S+$", re.MULTILINE)
# "[label]" alone or in "[text][label]", but no text before "(target)" or "[label]".
LABEL = re.compile(r"\[([^\[\]]+)\](?![(\[])")
# "`tests/bits.py`", or "`common/nested.py:12`".
FILE = re.compile(r"`((?:tests|common|benchmarks|0\d_\w+)/[\w/]+\.\w+)[`:]")
QUICK_START = """\
    python3 -m venv .venv && . .venv/bin/activate
    pip install -e '.[dev]'
    python -m benchmarks.compare
    pytest
"""


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The names by which a page's headings can be linked to."""
    titles = re.findall(r"^#+ (.*)$", without_blocks(text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_inside_the_repository_lead_somewhere(path):
    for target in TARGET.findall(without_blocks(path.read_text())):
        if "://" not in target:
            file, _, heading = target.partition("#")
            page = path.parent / file if file else path
            assert page.exists(), target
            assert not heading or heading in anchors(page.read_text()), target


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_the_labels_of_links_are_those_that_are_defined(path):
    code = re.compile(r"`[^`]*`|^    .*$", re.MULTILINE)  # Commands are indented.
    text = code.sub("", without_blocks(path.read_text()))
    used_in = " ".join(DEFINITION.sub("", text).split())
    assert set(LABEL.findall(used_in)) == set(DEFINITION.findall(text))


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_files_named_in_the_text_exist(path):
    for file in FILE.findall(path.read_text()):
        assert (ladder.ROOT / file).exists(), file


@pytest.fixture(scope="module")
def all_tests() -> set[str]:
    sources = [path.read_text() for path in (ladder.ROOT / "tests").rglob("test_*.py")]
    return set(re.findall(r"^def (test_\w+)\(", "\n".join(sources), re.MULTILINE))


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_the_tests_that_are_named_exist(path, all_tests):
    assert set(re.findall(r"`(test_\w+)`", path.read_text())) <= all_tests


DIFFERENCES = sorted(ladder.ROOT.glob("common/*/DIFFERENCES.md"))


@pytest.mark.parametrize("path", DIFFERENCES, ids=name)
def test_every_deliberate_difference_names_its_kind_and_a_test(path):
    rows = table_rows(path.read_text())
    assert rows
    for _, original, *_, test in rows:
        assert "**" in original, f"of which kind is it? {original}"
        assert test.startswith("`test_"), original


@pytest.mark.parametrize("path", DIFFERENCES, ids=name)
def test_the_files_that_the_differences_are_grouped_by_are_there(path):
    headings = [line for line in path.read_text().splitlines() if line.startswith("## `")]
    assert headings
    for heading in headings:
        files, _, _ = heading.partition(":")
        for file in files.split("`")[1::2]:
            assert (path.parent / file).exists(), heading


def test_every_module_says_its_idea_in_its_first_line():
    sources = {name(path): path.read_text() for path in MODULES}
    assert [file for file, text in sources.items() if text and not ast.get_docstring(ast.parse(text))] == []


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


@pytest.mark.parametrize("before, level", list(pairwise(ladder.LEVELS)))
def test_a_page_shows_a_diff_with_all_new_lines_but_imports(before, level):
    if level == "02_ddp_raw":
        before = "00_single_gpu"  # Level 02 has the loop of level 00.
    page = ladder.ROOT / level / "README.md"
    assert page in GENERATED
    assert re.search(rf"^<!-- (diff|added) {before[:2]} {level[:2]} -->$", page.read_text(), re.MULTILINE)
    shown = {line[2:] for line in readmes.diff(before, level).splitlines() if line.startswith("+ ")}
    new = set(ladder.lines_below_docstring(level)) - set(ladder.lines_below_docstring(before))
    assert new - shown == {line for line in new if line.startswith(("import ", "from "))}


@pytest.mark.parametrize("level", ladder.LEVELS)
def test_the_readme_says_how_many_lines_a_level_has(level):
    assert f"\n| [{level}] | {len(ladder.code_lines(level))} |" in (ladder.ROOT / "README.md").read_text()


def test_what_the_readme_says_of_two_devices_holds_in_the_record():
    def speed_up(group: dict, level: str) -> float:
        return speed_ups(group)[page_tables.row_of(group, level)]["median"]

    small, large = page_tables.recorded("results")["throughput"]
    for level in ladder.DISTRIBUTED:
        assert 1 < speed_up(small, level) < speed_up(large, level) < 2
        assert speed_up(small, "01_data_parallel") < speed_up(small, level)


def test_three_ranks_evaluate_as_many_images_as_level_02s_page_says():
    shards = [len(DistributedEvalSampler(range(10_000), num_replicas=3, rank=rank)) for rank in range(3)]
    text = " ".join((ladder.ROOT / "02_ddp_raw" / "README.md").read_text().split())
    assert "of the 10,000 test images three ranks evaluate {}, {} and {}".format(*shards) in text


@pytest.mark.parametrize("file", ["README.md", ".ci/run"])
def test_ci_has_the_commands_of_the_quick_start(file):
    assert QUICK_START in (ladder.ROOT / file).read_text()
