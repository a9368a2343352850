"""The output of a run: lines, a bar, trackers."""

import json
import os
import sys
from functools import partial
from unittest import mock

import pytest

from common.trainer import PrinterCallback, ProgressCallback
from common.trainer.reporting import default_reporter
from tests.unit.trainer.both import make, same_on_both
from tests.unit.trainer.toy import accuracy, make_trainer


@pytest.mark.parametrize("reporter", [PrinterCallback, ProgressCallback])
def test_each_evaluation_is_a_line(reporter, tmp_path, capsys):
    evaluated = {"evaluate": 8, "eval_strategy": "epoch", "num_train_epochs": 2, "logging_steps": 3}
    extra = {"compute_metrics": lambda prediction: accuracy(prediction) | {"text": 101 * "a"}}
    trainer = make_trainer(tmp_path, extra=extra, **evaluated)
    trainer.pop_callback(PrinterCallback)
    trainer.add_callback(reporter)
    trainer.train()
    out = "".join(capsys.readouterr())
    evaluations = [line for line in out.splitlines() if "eval_loss" in line]
    assert [line.rpartition("epoch ")[2] for line in evaluations] == ["1", "2"]
    assert all("eval_accuracy " in line for line in evaluations)
    text = 101 * "a" if reporter is PrinterCallback else "[String too long to display, length: 101 > 100."
    assert all(f"eval_text {text}" in line for line in evaluations)
    if reporter is ProgressCallback:
        last = out.split("\r")[-1]
        assert "10/10" in last and "loss=" in last and "learning_rate=" in last and "<" in last


def test_a_log_file_gets_lines_and_a_terminal_a_bar(monkeypatch):
    for terminal, expected in ((True, ProgressCallback), (False, PrinterCallback)):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal, raising=False)
        logs = {"total_flos": 0}
        default_reporter(None).on_log(None, mock.Mock(is_world_process_zero=False), None, logs)
        assert logs and isinstance(default_reporter(None), expected)
        assert type(default_reporter(not terminal)) is expected


def test_a_script_that_removes_the_printer_keeps_the_bar(tmp_path, transformers):
    def script(library, folder):
        trainer = make(library, folder, disable_tqdm=False)
        trainer.remove_callback(library.PrinterCallback)
        return [type(callback).__name__ for callback in trainer.callback_handler.callbacks]

    assert same_on_both(script, tmp_path) == ["DefaultFlowCallback", "ProgressCallback"]


def test_a_second_training_writes_every_line_once_under_the_same_name(tmp_path):
    trainer = make_trainer(tmp_path, report_to="jsonl", run_name="a_name_of_its_own", logging_steps=5)
    trainer.train()
    trainer.train()
    (log,) = tmp_path.rglob("*.jsonl")
    assert log.read_text().count("train/loss") == 2
    assert "a_name_of_its_own" in str(log) + log.read_text()


def test_trackers_get_the_names_of_transformers(tmp_path, transformers):
    from transformers.integrations.integration_utils import rewrite_logs

    logs = {"loss": 1.0, "eval_loss": 2.0, "test_loss": 3.0, "eval_test_loss": 4.0}
    trainer = make_trainer(tmp_path, report_to="jsonl", logging_strategy="no")
    trainer.train()
    trainer.log(dict(logs))
    [file] = tmp_path.rglob("*.jsonl")
    tracked = json.loads(file.read_text().splitlines()[-1])
    assert rewrite_logs(logs).items() <= tracked.items()


def test_a_file_of_results_is_replaced_or_left_alone(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    trainer.save_state()
    trainer.save_metrics("eval", {"loss": 1})
    before = {path: path.read_text() for path in tmp_path.iterdir()}
    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=OSError("the disk is full")))
    trainer.state.global_step = 1
    for write in (trainer.save_state, partial(trainer.save_metrics, "eval", {"loss": 2})):
        with pytest.raises(OSError, match="the disk is full"):
            write()
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before
