"""Loggers that speak once: who logs, in which order, with which file and line."""

import importlib
import logging

import pytest

from common.accelerator.logging import get_logger
from common.accelerator.state import PartialState
from common.processes import ranks
from tests.peers import import_or_skip
from tests.states import OURS, THEIRS, on_a_rank


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    level = logging.getLogger().level
    monkeypatch.delenv("ACCELERATE_LOG_LEVEL", raising=False)
    yield
    logging.getLogger().setLevel(level)


def test_without_a_state_the_logger_says_what_is_missing():
    logger = get_logger("early")
    with pytest.raises(RuntimeError, match=r"initialize the accelerate state .* Accelerator\(\) or PartialState\(\)"):
        logger.info("too early")


def test_the_level_is_the_arguments_or_else_the_environments(monkeypatch, caplog):
    PartialState(cpu=True)
    assert get_logger("a.level", "debug").logger.level == logging.DEBUG
    assert logging.getLogger().level == logging.DEBUG
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "error")
    logger = get_logger("b.level")
    logger.warning("not this")
    logger.error("but %s", "this")
    assert caplog.messages == ["[RANK 0] but this"]
    with pytest.raises(ValueError, match="LOUD"):
        get_logger("c.level", "loud")


def test_the_record_names_the_callers_line(caplog):
    PartialState(cpu=True)
    get_logger("d", "INFO").info("here", main_process_only=False)
    get_logger("d", "INFO").info("here", in_order=True)
    first, second = caplog.records
    assert second.lineno == first.lineno + 1
    for record in (first, second):
        assert (record.filename, record.funcName) == ("test_logging.py", "test_the_record_names_the_callers_line")


def test_each_warning_is_logged_once(caplog):
    PartialState(cpu=True)
    logger = get_logger("e", "INFO")
    for _ in range(3):
        logger.warning_once("the same")
        logger.warning_once("another")
    assert caplog.messages == ["[RANK 0] the same", "[RANK 0] another"]


@on_a_rank
def log_on_a_rank(library, path) -> None:
    """Every rank appends to one file, so that its lines show who logged and in which order."""
    state = importlib.import_module(f"{library}.state").PartialState(cpu=True)
    logger = importlib.import_module(f"{library}.logging").get_logger("f", "INFO")
    handler = logging.FileHandler(path)
    logger.logger.addHandler(handler)
    try:
        logger.info("main only")
        state.wait_for_everyone()
        for number in range(5):
            logger.warning("in turn %d", number, in_order=True)
        logger.error("all in turn", main_process_only=False, in_order=True)
        logger.info("all", main_process_only=False)
        logger.debug("nobody", in_order=True)
    finally:
        logger.logger.removeHandler(handler)


def test_ranks_log_once_in_order_or_all_as_on_accelerate(tmp_path):
    import_or_skip(THEIRS)
    lines = {}
    for library in (OURS, THEIRS):
        path = tmp_path / library
        ranks(2).run(log_on_a_rank, library, str(path), environment={"ACCELERATE_USE_CPU": "true"})
        *lines[library], one, other = path.read_text().splitlines()
        assert {one, other} == {"[RANK 0] all", "[RANK 1] all"}
    assert lines[OURS] == lines[THEIRS]
    in_turn = [f"[RANK {rank}] in turn {number}" for number in range(5) for rank in range(2)]
    assert lines[OURS] == ["[RANK 0] main only", *in_turn, "[RANK 0] all in turn", "[RANK 1] all in turn"]
