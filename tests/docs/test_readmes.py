"""What the pages say is what is there: links, diffs, counts and recorded numbers."""

import re
import shutil
from itertools import pairwise

import pytest

from benchmarks.report import page_tables, readmes
from common import ladder
from common.eval_sampler import DistributedEvalSampler
from common.ladder import scripts
from tests.docs.pages import PAGES, name, prose

GENERATED = readmes.readmes()
QUANTITY = re.compile(
    r"\b\d[\d.,]*[ -]?(?:[KMG]i?B|images/s|µs|ms|s|%|seconds|minutes|times)(?![\w-])|\b\d+\.\d+\b", re.IGNORECASE
)
# Quantities in prose that are no results: what they are, and where that is checked.
ARITHMETIC = {
    "8 times": "8 processes with their own batch each",
    "47 MB": "60,000 images of 28 × 28 pixels, a byte each",
    "25 MiB": "torch's default for a bucket",
    "1 MiB": "torch's default for the first bucket",
    "95 %": "the confidence that an interval asks for",
}


def anchors(text: str) -> set[str]:
    """The names by which a page's headings can be linked to."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_inside_the_repository_resolve(path):
    text = path.read_text()
    defined = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", text, re.MULTILINE))
    for reference in re.findall(r"\]\[([^\]]+)\]|\| \[([^\]]+)\] \|", re.sub(r"\s+", " ", prose(text))):
        assert "".join(reference) in defined, reference
    for label in defined:
        assert f"[{label}]" in re.sub(r"^\[[^\]]+\]: .*$", "", text, flags=re.MULTILINE).replace("\n", " "), (
            f"{label} is not used"
        )
    for target in [*re.findall(r'(?:\]\(|src=")([^)"\s]+)', text), *defined.values()]:
        if "://" in target:
            continue
        file, _, heading = target.partition("#")
        page = (path.parent / file) if file else path
        assert page.exists(), target
        assert not heading or heading in anchors(page.read_text()), target


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_files_named_in_the_text_exist(path):
    for file in re.findall(r"`((?:tests|common|benchmarks|0\d_\w+)/[\w/]+\.\w+)[`:]", path.read_text()):
        assert (ladder.ROOT / file).exists(), file


def test_the_generated_parts_have_not_drifted(capsys):
    assert len(GENERATED) >= 3 + len(ladder.levels())
    readmes.main(["--check"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("before, level", list(pairwise(ladder.levels())))
def test_a_page_shows_the_whole_diff(before, level):
    parts = {part[2].strip(): part[3] for part in readmes.PART.finditer(page_of(level)) if part[1] in ("diff", "added")}
    shown = [line for line in parts[f"{before[:2]} {level[:2]}"].splitlines() if line.startswith(("-", "+"))]
    assert all(line[2:] in ladder.source(level if line[0] == "+" else before) for line in shown)
    new = sum(line.startswith("+") for line in shown)
    imports = sum(line.startswith(("import ", "from ")) for line in ladder.source(level))
    assert 0 < ladder.changed_lines(before, level).added - new <= imports


def page_of(level: str) -> str:
    return (ladder.ROOT / level / "README.md").read_text()


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """The levels and the READMEs in a folder where they may be changed."""
    for path in {*ladder.ROOT.glob("0?_*/t*.py"), *GENERATED}:
        target = tmp_path / path.relative_to(ladder.ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    monkeypatch.setattr(scripts, "ROOT", tmp_path)
    return tmp_path


def drifted() -> bool:
    """Does a page no longer say what is there?"""
    return any(readmes.renewed(path.read_text()) != path.read_text() for path in readmes.readmes())


def test_changing_a_sentence_is_not_noticed_and_survives(copy):
    """What is written by hand belongs to the hand."""
    page = copy / "02_ddp_raw" / "README.md"
    page.write_text(page.read_text().replace("**Who am I?**", "**Which rank am I?**"))
    assert not drifted()
    script = copy / "02_ddp_raw" / "train.py"
    script.write_text(script.read_text().replace("# the bare network", "# the network itself"))
    with pytest.raises(SystemExit, match="writes the pages again"):
        readmes.main(["--check"])
    readmes.main([])
    assert "**Which rank am I?**" in page.read_text() and "# the network itself" in page.read_text() and not drifted()


def test_a_part_that_nobody_can_write_is_refused():
    with pytest.raises(ValueError, match="no part 'wishes'"):
        readmes.renewed("<!-- wishes -->\n<!-- /wishes -->\n")


@pytest.mark.parametrize("path", GENERATED, ids=name)
def test_quantities_in_the_prose_are_no_results(path):
    """What was measured stands in generated parts, where it cannot differ from its record.

    The numbers in the answers of exercises are compared by `test_exercises.py`.
    """
    text = re.sub(r"<details>.*?</details>", "", prose(path.read_text()), flags=re.DOTALL)
    for quantity in QUANTITY.findall(re.sub(r"`[^`]*`|\]\([^)]*\)|^\[.*$", "", text, flags=re.M)):
        assert quantity in ARITHMETIC or quantity == "3.11", quantity


@pytest.mark.parametrize("path", GENERATED, ids=name)
def test_tables_and_text_fit_into_80_columns(path):
    """Code is as wide as it is; a picture's or a link's address cannot be folded."""
    text = path.read_text()
    for line in prose(text).splitlines():
        assert len(line) <= 80 or line.startswith(("![", "[")), line
    for part in readmes.PART.finditer(text):
        if part[1] not in ("diff", "added"):
            assert max(map(len, part[3].splitlines())) <= 80, part[0]


def test_what_the_readme_says_of_two_devices_holds_in_the_record():
    record = page_tables.recorded("results")
    small, large = (
        {level: page_tables.paired(group, level) for level in ladder.levels()[1:]} for group in record["throughput"]
    )
    for level in ladder.DISTRIBUTED:
        assert 1 < small[level] < large[level] < 2
        assert small["01_data_parallel"] < small[level]


def test_three_ranks_evaluate_as_many_images_as_level_02s_page_says():
    shards = [len(DistributedEvalSampler(range(10_000), num_replicas=3, rank=rank)) for rank in range(3)]
    text = " ".join((ladder.ROOT / "02_ddp_raw" / "README.md").read_text().split())
    assert "of the 10,000 test images three ranks evaluate {}, {} and {}".format(*shards) in text


def test_ci_runs_the_two_commands_of_the_quick_start():
    readme, ci = (ladder.ROOT / "README.md").read_text(), (ladder.ROOT / ".ci" / "run").read_text()
    start = re.findall(r"^    (\[ -d \.venv \].*)$", readme, re.MULTILINE)
    assert len(start) == 2
    assert start[0].endswith("python -m benchmarks.compare") and start[1].endswith("&& pytest")
    assert start[0] in ci and start[1] in ci


def unknown_tests(text: str) -> list[str]:
    """The tests that `text` names in backticks and that there are not."""
    sources = "\n".join(path.read_text() for path in (ladder.ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", text)
    return [name for name in named if not re.search(rf"^def {name}\(", sources, re.MULTILINE)]


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_the_tests_that_are_named_exist(path):
    assert unknown_tests(path.read_text()) == []
    assert unknown_tests("`test_the_tests_that_are_named_exist`, `test_of_nothing`") == ["test_of_nothing"]
