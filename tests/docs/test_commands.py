"""Every command of a page or a module's docstring works as it stands.

Its own program parses it, and what takes seconds is run.
"""

import argparse
import contextlib
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common import ladder
from common.accelerator.commands import launch
from common.accelerator.commands.config.config_args import load_config_from_file
from common.args import parse_args
from common.ladder import scripts
from common.processes import ranks
from tests.docs.pages import MODULES, PAGES, commands, name
from tests.levels import run_level

# Modules are run that other tests have imported.
pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
WITH_COMMANDS = [path for path in [*PAGES, *MODULES] if commands(path)]
LEVEL = re.compile(r"0\d_\w+/train(_full)?\.py$")
# A little of everything: what a command says about the rest stays.
LITTLE = ["--dataset", "synthetic", "--train-samples", "600", "--eval-samples", "101", "--max-steps", "2"]


def under_torchrun(words: list[str]) -> tuple[str, list[str], int, int]:
    """What torchrun makes of a command: script, its flags, processes a node, nodes."""
    from torch.distributed.run import parse_args as torchrun

    options = torchrun(words)
    return (
        options.training_script,
        options.training_script_args,
        int(options.nproc_per_node),
        int(options.nnodes.split(":")[-1]),
    )


def launched(words: list[str]) -> tuple[str, list[str], int, int]:
    """The same for our launcher; a flag or the configuration file says how many processes there are."""
    options = launch.launch_command_parser().parse_args(words)
    processes = options.num_processes
    if processes is None:
        processes = load_config_from_file(options.config_file).num_processes
    return options.training_script, options.training_script_args, processes, 1


def script_and_world(words: list[str]) -> tuple[str, list[str], int, int] | None:
    """Script, flags, processes a node and nodes of a command that runs a script; None for one that runs a module."""
    program, *rest = words
    if program == "torchrun":
        return under_torchrun(rest)
    if rest[:2] == ["-m", "torch.distributed.run"] and rest[2:]:
        return under_torchrun(rest[2:])
    if rest[:3] == ["-m", "common.accelerator", "launch"]:
        return launched(rest[3:])
    return None if rest[0] == "-m" else (rest[0], rest[1:], 1, 1)


class Parsed(Exception):
    """A program has parsed its command line, and would begin now."""


def parse(words: list[str], monkeypatch) -> list[str]:
    """Let a program parse its command line as it stands, and end it there. Returns what it left unparsed."""
    parse_known_args = argparse.ArgumentParser.parse_known_args
    parse_args = argparse.ArgumentParser.parse_args

    def known(self, *args, **kwargs):
        options, rest = parse_known_args(self, *args, **kwargs)
        if sys._getframe(1).f_globals["__name__"] != "argparse":  # else for `parse_args`, or for a command of its own
            raise Parsed(rest)
        return options, rest

    def all_of_them(self, *args, **kwargs):
        parse_args(self, *args, **kwargs)
        raise Parsed([])

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", known)
        patch.setattr(argparse.ArgumentParser, "parse_args", all_of_them)
        is_module = words[0] == "-m"
        patch.setattr(sys, "argv", words[is_module:])
        with pytest.raises(Parsed) as parsed:
            if is_module:
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                patch.syspath_prepend(Path(words[0]).parent)  # as Python does
                runpy.run_path(words[0], run_name="__main__")
    return parsed.value.args[0]


@pytest.mark.parametrize("path", WITH_COMMANDS, ids=name)
def test_each_program_takes_its_command_line_as_it_stands(path, monkeypatch):
    monkeypatch.chdir(ladder.ROOT)
    for words in commands(path):
        if words[0] == "pytest" or (words[1:3] == ["-m", "torch.distributed.run"] and not words[3:]):  # named, not used
            continue
        found = script_and_world(words)
        if found is None:
            rest = parse(words[1:], monkeypatch)
            if rest:
                assert words[2:4] == ["common.ladder", "run"], words
                parse_args(str(ladder.script(scripts.named(words[4]))), rest)
            continue
        script, flags, processes, nodes = found
        assert (ladder.ROOT / script).exists(), words
        if LEVEL.search(script):
            world = dict.fromkeys(("RANK", "LOCAL_RANK", "MASTER_PORT"), "0") | {"MASTER_ADDR": "localhost"}
            world |= {"WORLD_SIZE": str(processes * nodes), "LOCAL_WORLD_SIZE": str(processes)}
            for key, value in world.items():
                monkeypatch.setenv(key, value)
            parse_args(script, flags)
        else:
            parse([script, *flags], monkeypatch)


def test_programs_that_are_named_exist():
    named = {name for path in PAGES for name in re.findall(r"`python\s-m\s([\w.]+)`", path.read_text())}
    assert {"benchmarks.compare"} <= named
    for module in named:
        assert importlib.util.find_spec(module), module


def all_commands() -> list[list[str]]:
    found = [tuple(words) for path in WITH_COMMANDS for words in commands(path)]
    return [list(words) for words in dict.fromkeys(found)]


# Programs that take a second or a few, and need nothing. Tests of their own run the others, with less to do.
QUICK = {"common.ladder", "benchmarks.report.readmes"}
# What a command leaves to its reader, or reads where another one has written it.
OWN_FILES = re.compile(r"FOLDER|PATH|DATA|SCRIPT|(solution|my_\w+)\.py|\w+\.json")


def quick_commands() -> list:
    """Of the commands that ask a program for one thing one is slow. The others are long."""
    ways = set()
    cases = []
    for words in all_commands():
        has_own_test = words[2:4] in (["common.ladder", "run"], ["common.ladder", "check"])
        is_quick = words[:2] == ["python", "-m"] and words[2] in QUICK
        if is_quick and not has_own_test and not OWN_FILES.search(" ".join(words)):
            way = tuple(words[2:4])
            cases.append(
                pytest.param(words[1:], id=" ".join(words), marks=pytest.mark.long if way in ways else pytest.mark.slow)
            )
            ways.add(way)
    return cases


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The tracked files in a folder of their own, where a command may write."""
    folder = tmp_path_factory.mktemp("clone")
    listed = subprocess.run(["git", "ls-files"], cwd=ladder.ROOT, capture_output=True, text=True, check=True)
    for file in listed.stdout.splitlines():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ladder.ROOT / file, folder / file)
    return folder


@pytest.mark.parametrize("words", quick_commands())
def test_a_module_runs_as_it_stands(words, clone):
    environment = os.environ | {"PYTHONPATH": str(clone)}
    done = subprocess.run(
        [sys.executable, *words], cwd=clone, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def in_folder(folder: str, rung: str, flags: list[str]) -> dict:
    os.chdir(folder)
    return run_level(rung, flags)[0]


def level_commands() -> dict[str, list[str]]:
    found = {}
    for words in (words for path in WITH_COMMANDS for words in commands(path)):
        with contextlib.suppress(SystemExit):  # one that cannot be parsed fails the test above
            if LEVEL.search((script_and_world(words) or ("",))[0]):
                found[" ".join(words)] = words
    return found


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ladder.ROOT)


def marked_commands() -> list:
    """Of the commands that start a script one is slow, one with several processes, and one of the launcher's.

    The others are long.
    """
    ways = set()
    cases = []
    for text, words in level_commands().items():
        script, _, processes, nodes = script_and_world(words)
        way = "launch" if "launch" in words else (script, processes * nodes > 1)
        cases.append(pytest.param(text, marks=pytest.mark.long if way in ways else pytest.mark.slow))
        ways.add(way)
    return cases


@pytest.mark.parametrize("text", marked_commands())
def test_the_commands_of_the_levels_train_and_evaluate(text, tmp_path, monkeypatch):
    """With as many processes as they say, on a few samples; those of the launcher through the launcher."""
    words = level_commands()[text]
    script, flags, processes, nodes = script_and_world(words)
    rung = script.removesuffix("/train.py").removesuffix(".py")
    level = ladder.level_of(rung)
    flags = [*flags, *LITTLE]
    if "launch" in words:
        command = [sys.executable, "-m", *words[2:], *LITTLE]
        environment = os.environ | {"PYTHONPATH": str(ladder.ROOT)}
        done = subprocess.run(command, cwd=ladder.ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and "of 101 |" in done.stdout, done.stderr
        return
    if words[0] == "python":
        monkeypatch.chdir(tmp_path)
        results = [run_level(rung, flags)[0]]
    else:
        results = ranks(processes * nodes).run(in_folder, str(tmp_path), rung, flags)
    for result in results:
        assert (result["level"], result["steps"], result["evaluated"]) == (level, 2, 101)
        assert level == "01_data_parallel" or result["world_size"] == processes * nodes


def test_there_are_commands():
    assert len(level_commands()) > 20
    modules = {words[2] for path in WITH_COMMANDS for words in commands(path) if words[1] == "-m"}
    assert {"common.ladder", "benchmarks.compare", "benchmarks.report", "benchmarks.report.readmes"} <= modules


def test_a_wrong_flag_would_be_found(monkeypatch, tmp_path):
    page = tmp_path / "README.md"
    page.write_text("    python 00_single_gpu/train.py --replicas 4\n")
    with pytest.raises(SystemExit):
        test_each_program_takes_its_command_line_as_it_stands(page, monkeypatch)
    page.write_text("    python -m benchmarks.your_network predict torchvision:resnet18 --gpu abacus\n")
    with pytest.raises(SystemExit):
        test_each_program_takes_its_command_line_as_it_stands(page, monkeypatch)
