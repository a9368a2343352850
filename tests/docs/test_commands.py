"""Every command of a page or a module's docstring is one that its program takes, and some of each kind are run."""

import ast
import io
import re
import runpy
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
from torch.distributed.run import parse_args as torchrun_options

from common import ladder
from common.accelerator.commands.launch import launch_command_parser
from common.doctor.__main__ import parse_options as doctor_options
from tests.docs.pages import MODULES, PAGES, commands, name, outputs, run

QUICK_START = """\
    python3 -m venv .venv && . .venv/bin/activate
    pip install -e '.[dev]'
    python -m benchmarks.compare
    pytest
"""
WITH_COMMANDS = [path for path in [*PAGES, *MODULES] if commands(path)]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ladder.ROOT)


def without_launcher(words: list[str]) -> list[str]:
    """The command that a launcher would start, after it has parsed its own flags. Others come back as they are."""
    if words[0] == "torchrun":
        options = torchrun_options(words[1:])
        return ["python", options.training_script, *options.training_script_args]
    if words[1:4] == ["-m", "common.accelerator", "launch"]:
        options = launch_command_parser().parse_args(words[4:])
        assert options.config_file is None or Path(options.config_file).exists(), options.config_file
        return ["python", options.training_script, *options.training_script_args]
    return words


def check_program(words: list[str]) -> None:
    """Run the program with its flags and then `--help`, which ends it after all values before it have been parsed.

    argparse refuses an unknown flag only after that, so the flags are looked for in the help that it prints.
    """
    is_module = words[1] == "-m"
    argv = words[2:] if is_module else words[1:]
    folder = str(Path(argv[0]).parent)
    with (
        patch.object(sys, "argv", [*argv, "--help"]),
        patch.object(sys, "path", [folder, *sys.path]),  # Python does so for a script.
        redirect_stdout(io.StringIO()) as printed,
        pytest.raises(SystemExit) as ended,
    ):
        if is_module:
            runpy.run_module(argv[0], run_name="__main__")
        else:
            runpy.run_path(argv[0], run_name="__main__")
    assert ended.value.code == 0, shlex.join(words)
    flags = {word.partition("=")[0] for word in argv if word.startswith("--")}
    assert flags <= set(re.findall(r"--[\w-]+", printed.getvalue())), shlex.join(words)


def check_command(words: list[str]) -> None:
    if words[0] == "pytest":
        for word in words:
            assert not word.startswith("tests/") or Path(word).exists(), word
        return
    if words[1:3] == ["-m", "common.doctor"]:
        doctor_options(words[3:])  # The script is the reader's own, and may not be there.
        return
    words = without_launcher(words)
    # This script takes no flags: with --help it would train.
    if words != ["python", "02_ddp_raw/minimal.py"]:
        check_program(words)


# `check_program` runs modules that other tests have imported.
IGNORE_IMPORTED_BEFORE = pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")


@IGNORE_IMPORTED_BEFORE
@pytest.mark.parametrize("path", WITH_COMMANDS, ids=name)
def test_each_program_takes_its_command_line(path):
    for words in commands(path):
        check_command(words)


@IGNORE_IMPORTED_BEFORE
@pytest.mark.parametrize(
    "command, error, message",
    [
        ("python 00_single_gpu/train.py --replicas 4", AssertionError, "--replicas 4"),
        ("python 00_single_gpu/no_script.py", FileNotFoundError, "no_script.py"),
        ("torchrun --no-such-flag 02_ddp_raw/train.py", SystemExit, "2"),
        ("python -m common.accelerator launch --config_file no_file.yaml x.py", AssertionError, "no_file.yaml"),
        ("pytest tests/no_folder", AssertionError, "tests/no_folder"),
    ],
)
def test_a_wrong_command_would_be_found(command, error, message):
    with pytest.raises(error, match=message):
        check_command(command.split())


LITTLE = "--dataset synthetic --train-samples 600 --eval-samples 101 --max-steps 2"
# Commands that are run, with the flags added to shorten them. `tests/parity/test_scripts.py` runs more.
SHORTENED = {
    "python -m common.accelerator launch --config_file 03_accelerate/two_processes.yaml 04_trainer/train.py": LITTLE,
    "python -m common.accelerator launch --config_file 03_accelerate/fsdp_two_processes.yaml"
    " 03_accelerate/train.py": LITTLE,
    "python 03_accelerate/train_full.py --gradient-accumulation-steps 4 --mixed-precision bf16": LITTLE,
    "python 04_trainer/train_full.py --gradient-accumulation-steps 4 --mixed-precision bf16": LITTLE,
    "python 03_accelerate/examples/wide_net.py --epochs 1 --max-steps 3 --batch-size 16 --train-samples 160"
    " --eval-samples 100": "",
}


@pytest.mark.slow
@pytest.mark.parametrize("command, flags", SHORTENED.items())
def test_a_command_runs_as_it_stands(command, flags):
    assert command.split() in [words for path in WITH_COMMANDS for words in commands(path)]
    done = run([*command.split(), *flags.split()])
    assert done.returncode == 0, done.stderr
    if flags:
        assert "of 101 |" in done.stdout  # This many samples were evaluated.


def test_pages_show_outputs_only_where_they_are_compared():
    """`test_one_step` and `test_failures` run the commands of these pages."""
    assert [name(path) for path in PAGES if outputs(path)] == ["02_ddp_raw/README.md", "02_ddp_raw/WHEN_IT_HANGS.md"]


@pytest.mark.parametrize("file", ["README.md", ".ci/run"])
def test_readme_and_ci_have_the_same_quick_start(file):
    assert QUICK_START in Path(file).read_text()


def test_every_module_has_a_docstring():
    sources = {name(path): path.read_text() for path in MODULES}
    assert [file for file, text in sources.items() if text and not ast.get_docstring(ast.parse(text))] == []
