"""The READMEs' commands are commands that work, and their links lead somewhere."""

import json
import re
import shlex

import pytest

from benchmarks.compare import notes, table
from common import ladder
from common.args import parse_args

READMES = sorted(path for path in ladder.ROOT.rglob("README.md") if ".venv" not in path.parts)
COMMAND = re.compile(r"(?:torchrun|python) [^`\n]*?0\d_\w+/train\.py[^`\n]*")


def _text(path) -> str:
    return path.read_text().replace("\\\n", " ")


def _name(path) -> str:
    return str(path.relative_to(ladder.ROOT))


@pytest.mark.parametrize("path", READMES, ids=_name)
def test_links_inside_the_repository_resolve(path):
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", READMES, ids=_name)
def test_commands_start_levels_that_exist_with_flags_that_they_take(path, monkeypatch):
    for command in COMMAND.findall(_text(path)):
        before, script, flags = re.split(r"(0\d_\w+/train\.py)", command, maxsplit=1)
        assert (ladder.ROOT / script).exists(), command
        words = shlex.split(before)
        processes = int(words[words.index("--nproc-per-node") + 1]) if "--nproc-per-node" in words else 1
        nodes = int(words[words.index("--nnodes") + 1]) if "--nnodes" in words else 1
        names = ("RANK", "LOCAL_RANK", "MASTER_PORT")
        world = dict.fromkeys(names, "0") | {"MASTER_ADDR": "localhost", "LOCAL_WORLD_SIZE": str(processes)}
        for name, value in (world | {"WORLD_SIZE": str(processes * nodes)}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(ladder.ROOT)
        parse_args(script, shlex.split(flags))


def test_the_readmes_have_commands_and_ci_runs_the_two_of_the_quick_start():
    assert sum(len(COMMAND.findall(_text(path))) for path in READMES) > 15
    readme, ci = (ladder.ROOT / "README.md").read_text(), (ladder.ROOT / ".ci" / "run").read_text()
    start = re.findall(r"^    (\[ -d \.venv \].*)$", readme, re.MULTILINE)
    assert len(start) == 2
    assert start[0].endswith("python -m benchmarks.compare") and start[1].endswith("&& pytest")
    assert ci.rstrip().endswith(start[1]) and start[0] in ci


def test_the_table_of_the_readme_is_the_recorded_one():
    report = json.loads((ladder.ROOT / "benchmarks/results/amd-epyc-2-cores/compare.json").read_text())
    lines = (ladder.ROOT / "README.md").read_text().splitlines()
    for line in (*table(report).splitlines(), *notes(report).splitlines()):
        assert f"    {line}".rstrip() in lines and len(line) <= 80, line


def _unknown_tests(text: str) -> list[str]:
    """The tests that `text` names in backticks and that there are not."""
    sources = "\n".join(path.read_text() for path in (ladder.ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", text)
    return [name for name in named if not re.search(rf"^def {name}\(", sources, re.MULTILINE)]


@pytest.mark.parametrize("path", READMES, ids=_name)
def test_the_tests_that_are_named_exist(path):
    assert _unknown_tests(path.read_text()) == []
    assert _unknown_tests("`test_the_tests_that_are_named_exist`, `test_of_nothing`") == ["test_of_nothing"]
