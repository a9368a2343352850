"""The whole suite is shared out over the cores; what the command line names runs in one process (tests/conftest.py)."""

from types import SimpleNamespace

import pytest
import torch

from tests import conftest

WHOLE_SUITE = pytest.Config.ArgsSource.TESTPATHS
NAMED = pytest.Config.ArgsSource.ARGS


@pytest.fixture
def decide(monkeypatch):
    """A function that says how many workers a command has, and how they share the suite."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")

    def workers(args_source, cores=2, gpu=False, numprocesses=None, usepdb=False, xdist=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(conftest, "available_cores", lambda: cores)
        option = SimpleNamespace(numprocesses=numprocesses, dist="no", usepdb=usepdb)
        plugins = SimpleNamespace(hasplugin=lambda name: xdist and name == "xdist")
        conftest.pytest_cmdline_main(SimpleNamespace(args_source=args_source, option=option, pluginmanager=plugins))
        return option.numprocesses, option.dist

    return workers


def test_the_whole_suite_has_a_worker_for_each_of_up_to_four_cores(decide):
    assert decide(WHOLE_SUITE, cores=2) == (2, "loadfile")
    assert decide(WHOLE_SUITE, cores=64) == (4, "loadfile")


@pytest.mark.parametrize(
    "case",
    [
        {"args_source": NAMED},
        {"args_source": WHOLE_SUITE, "cores": 1},
        {"args_source": WHOLE_SUITE, "gpu": True},
        {"args_source": WHOLE_SUITE, "usepdb": True},
        {"args_source": WHOLE_SUITE, "xdist": False},
    ],
    ids=["a file", "one core", "a GPU", "a debugger", "without pytest-xdist"],
)
def test_everything_else_runs_in_one_process(case, decide):
    assert decide(**case) == (None, "no")


def test_what_the_command_line_asks_for_is_kept(decide):
    assert decide(WHOLE_SUITE, cores=64, numprocesses=0) == (0, "no")
    assert decide(WHOLE_SUITE, cores=2, numprocesses=8) == (8, "no")


def test_a_worker_does_not_start_workers(decide, monkeypatch):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    assert decide(WHOLE_SUITE) == (None, "no")
