"""`python -m common.accelerator test`: a verdict from a real run, and a run that finds what is broken."""

import subprocess
import sys
from unittest import mock

import pytest

from common.accelerator import Accelerator
from common.accelerator.commands import self_check
from common.accelerator.commands.accelerate_cli import main
from tests.jobs import run_to_end
from tests.unit.accelerator.several_processes import on_ranks

CPU = ["--cpu", "--num_processes", "2"]
FSDP = ["--config_file", "03_accelerate/fsdp_two_processes.yaml"]


@pytest.mark.parametrize(
    "argv, kind",
    [pytest.param(CPU, "MULTI_CPU", marks=pytest.mark.slow), pytest.param(FSDP, "FSDP", marks=pytest.mark.long)],
)
def test_a_real_run_passes_each_check(argv, kind, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    result = run_to_end([sys.executable, "-m", "common.accelerator", "test", *argv])
    assert result.returncode == 0, result.stderr
    *checks, verdict = result.stdout.splitlines()
    assert len(checks) == 2 and all(line.startswith("ok: ") for line in checks)
    assert verdict == f"PASSED: 2 × cpu ({kind})"


def test_a_failure_is_a_verdict_too(monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "run", lambda command, check: subprocess.CompletedProcess(command, 3))
    assert main(["test", "--cpu"]) == 3
    assert "FAILED" in capsys.readouterr().out


def run_check(accelerator: Accelerator, name: str, broken: str) -> str:
    """The message of the check called `name` on a core in which the method `broken` does nothing."""
    with mock.patch.object(Accelerator, broken, lambda self, value, *rest, **kwargs: value):
        try:
            getattr(self_check, name)(accelerator)
        except SystemExit as failure:
            return str(failure)
    return "passed"


@pytest.mark.parametrize(
    "check, broken, message",
    [
        ("check_sharding", "gather_for_metrics", "samples were lost or repeated"),
        ("check_training", "prepare_model", "the ranks ended with different weights"),
    ],
)
def test_each_check_notices_its_fault(check, broken, message):
    answers = on_ranks(2, run_check, check, broken, timeout=60)
    assert any(message in answer for answer in answers), answers


def test_a_number_of_accumulation_steps_in_the_environment_is_no_fault(monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    self_check.main()
    assert "PASSED: 1 × cpu" in capsys.readouterr().out
