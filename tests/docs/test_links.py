"""The pages link to, and name, what is there: pages, headings, files, and tests."""

import re

import pytest

from common import ladder
from tests.docs.pages import FILES, PAGES, name, table_rows

DIFFERENCES = sorted(ladder.ROOT.glob("common/*/DIFFERENCES.md"))
# "](target)" of a link, "[label]: target", and <img src="target">.
TARGET = re.compile(r'(?:\]\(|\]: |src=")([^)"\s]+)')
# "[label]: target"
DEFINITION = re.compile(r"^\[([^\]]+)\]: \S+$", re.MULTILINE)
# "[label]" alone or in "[text][label]", but no text before "(target)" or "[label]".
LABEL = re.compile(r"\[([^\[\]]+)\](?![(\[])")
# "`tests/bits.py`", "`common/nested.py:12`", or "`parity/test_small*.py`".
FILE = re.compile(r"`((?:[\w.*-]+/)+[\w*-]+\.\w+|\w+\.(?:py|md))[`:]")
NOT_OURS = {
    "PATH/my_file.py",  # the reader's own
    "utils/launch.py",  # accelerate's, and the others are transformers'
    "data/data_collator.py",
    "trainer_optimizer.py",
    "trainer_pt_utils.py",
    "trainer_utils.py",
}


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
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
    """A path begins in the root or in the page's folder; a name alone is that of a file anywhere."""
    names = {file.name for file in FILES}
    for file in set(FILE.findall(path.read_text())) - NOT_OURS - names:
        assert any(ladder.ROOT.glob(file)) or any(path.parent.glob(file)), file


@pytest.fixture(scope="module")
def all_tests() -> set[str]:
    sources = [path.read_text() for path in (ladder.ROOT / "tests").rglob("test_*.py")]
    return set(re.findall(r"^def (test_\w+)\(", "\n".join(sources), re.MULTILINE))


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_the_tests_that_are_named_exist(path, all_tests):
    assert set(re.findall(r"`(test_\w+)`", path.read_text())) <= all_tests


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
