"""Every command in a README or a module's docstring is one that works: all are parsed, those of the levels are run."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys

import pytest

from common import ladder
from common.accelerator.commands import launch
from common.accelerator.commands.config.config_args import load_config_from_file
from common.args import parse_args
from common.processes import ranks
from tests.docs.pages import MODULES, READMES, commands, name
from tests.levels import run_level

# Modules are run that other tests have imported.
pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
PAGES = [path for path in [*READMES, *MODULES] if commands(path)]
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


def help_of(run, argv: list[str], monkeypatch) -> str:
    """What a program prints when it is asked for help after `argv`; it must end well."""
    monkeypatch.setattr(sys, "argv", [*argv, "--help"])
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code in (0, None), argv
    return shown.getvalue()


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_commands_start_what_exists_with_flags_that_it_takes(path, monkeypatch):
    monkeypatch.chdir(ladder.ROOT)
    for words in commands(path):
        found = script_and_world(words)
        if found is None:
            module, flags = words[2], words[3:]
            if module == "torch.distributed.run":  # named, not used
                continue
            shown = help_of(
                lambda module=module: runpy.run_module(module, run_name="__main__"), [module, *flags], monkeypatch
            )
        else:
            script, flags, processes, nodes = found
            assert (ladder.ROOT / script).exists(), words
            if LEVEL.search(script):
                world = dict.fromkeys(("RANK", "LOCAL_RANK", "MASTER_PORT"), "0") | {"MASTER_ADDR": "localhost"}
                world |= {"WORLD_SIZE": str(processes * nodes), "LOCAL_WORLD_SIZE": str(processes)}
                for key, value in world.items():
                    monkeypatch.setenv(key, value)
                parse_args(script, flags)
                continue
            shown = help_of(
                lambda script=script: runpy.run_path(script, run_name="__main__"), [script, *flags], monkeypatch
            )
        for flag in (word for word in flags if word.startswith("--")):
            assert flag in shown, words


def in_folder(folder: str, rung: str, flags: list[str]) -> dict:
    os.chdir(folder)
    return run_level(rung, flags)[0]


def level_commands() -> dict[str, list[str]]:
    found = {}
    for words in (words for path in PAGES for words in commands(path)):
        with contextlib.suppress(SystemExit):  # one that cannot be parsed fails the test above
            if LEVEL.search((script_and_world(words) or ("",))[0]):
                found[" ".join(words)] = words
    return found


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ladder.ROOT)


def marked_commands() -> list:
    """Of the commands that start one script in one way, with as many processes, one is slow and the others long."""
    ways = set()
    cases = []
    for text, words in level_commands().items():
        script, _, processes, nodes = script_and_world(words)
        way = script, processes, nodes, "launch" in words
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
    modules = {words[2] for path in PAGES for words in commands(path) if words[1] == "-m"}
    assert {"common.ladder", "benchmarks.compare", "benchmarks.report", "benchmarks.report.readmes"} <= modules


def test_a_wrong_flag_would_be_found(monkeypatch, tmp_path):
    page = tmp_path / "README.md"
    page.write_text("    python 00_single_gpu/train.py --replicas 4\n")
    with pytest.raises(SystemExit):
        test_commands_start_what_exists_with_flags_that_it_takes(page, monkeypatch)
    page.write_text("    python -m benchmarks.compare --no-such-flag\n")
    with pytest.raises(AssertionError):
        test_commands_start_what_exists_with_flags_that_it_takes(page, monkeypatch)
