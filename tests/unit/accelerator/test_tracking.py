"""Trackers: what log_with accepts, what each writes, and that one process writes it."""

import json
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch

from common.accelerator import Accelerator, tracking
from common.accelerator.state import PartialState
from common.accelerator.tracking import GeneralTracker, JSONLinesTracker, on_main_process, select_trackers
from common.processes import ranks
from tests.peers import import_or_skip
from tests.states import on_a_rank
from tests.unit.accelerator.several_processes import on_ranks


@pytest.fixture(autouse=True)
def one_process(fresh_states):
    PartialState(cpu=True)


def tracker_of_the_script():
    """An object that derives from nothing, has a tracker's methods, and keeps their calls."""
    tracker = mock.NonCallableMock(spec=["name", "store_init_configuration", "log", "finish"])
    tracker.name = "mine"
    return tracker


def rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines_hold_the_configuration_and_every_step(tmp_path):
    tracker = JSONLinesTracker("run", tmp_path / "logs")
    assert not (tmp_path / "logs").exists(), "nothing is opened before start"
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1, "layers": [1, 2], "resume": None})
    tracker.log({"loss": torch.tensor(0.5), "accuracy": numpy.float32(0.25)}, step=3)
    path = tmp_path / "logs" / "run.jsonl"
    expected = [{"config": {"lr": 0.1, "layers": [1, 2], "resume": None}}, {"step": 3, "loss": 0.5, "accuracy": 0.25}]
    assert rows(path) == expected, "on disk before finish"
    tracker.log({"worst": -math.inf, "note": "é\n"})
    tracker.finish()
    assert rows(path)[2:] == [{"step": None, "worst": -math.inf, "note": "é\n"}]

    resumed = JSONLinesTracker("run", tmp_path / "logs")
    resumed.start()
    resumed.log({"loss": 0.1, "step": 400}, step=4)
    resumed.finish()
    assert rows(path)[:2] == expected and rows(path)[3:] == [{"step": 4, "loss": 0.1, "values.step": 400}]


def test_values_of_any_kind_may_be_logged(tmp_path):
    pytest.importorskip("tensorboard")
    accelerator = Accelerator(cpu=True, log_with=["jsonl", "tensorboard"], project_dir=tmp_path)
    config = {"p": Path("x"), "when": {"at": Path("y")}, "lr": numpy.float32(0.5), "none": None}
    accelerator.init_trackers("run", config=config)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in (1, 2):
            accelerator.log({"a": None, "list": [1.0], "place": Path("z"), "in": {"b": "c"}, "loss": 1}, step=step)
    accelerator.end_training()
    messages = [str(warning.message) for warning in warned]
    skipped = [message.split("'")[1] for message in messages if "cannot log" in message]
    assert skipped == ["a", "list", "place", "in"] * 2, "by TensorBoard"
    assert rows(tmp_path / "run.jsonl") == [
        {"config": {"p": "x", "when": {"at": "y"}, "lr": 0.5, "none": None}},
        *[{"step": step, "a": None, "list": [1.0], "place": "z", "in": {"b": "c"}, "loss": 1} for step in (1, 2)],
    ]


def test_tensorboard_writes_the_events_of_accelerates(tmp_path):
    theirs = import_or_skip("accelerate.tracking")
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from accelerate.state import PartialState as TheirState

    TheirState(cpu=True)
    found = []
    for module, name in ((theirs, "theirs"), (tracking, "ours")):
        tracker = module.TensorBoardTracker(name, str(tmp_path))
        tracker.start()
        tracker.store_init_configuration({"lr": 0.1, "layers": 3, "name": "net", "on": True, "resume": None})
        tracker.log({"loss": torch.tensor(0.5), "epoch": 1, "note": "text", "both": {"train": 2, "eval": 3}}, step=7)
        tracker.log_images({"images": numpy.ones((1, 3, 4, 4))}, step=7)
        assert type(tracker.tracker).__name__ == "SummaryWriter"
        tracker.finish()
        events = event_accumulator.EventAccumulator(str(tmp_path / name)).Reload()
        assert events.Tags()["tensors"] == ["note/text_summary"] and events.Tags()["images"] == ["images"]
        found.append({tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]})
        both = event_accumulator.EventAccumulator(str(tmp_path / name / "both_eval")).Reload()
        found[-1]["eval"] = [(e.step, e.value) for e in both.Scalars("both")]
    assert found[0] == found[1] == {"loss": [(7, 0.5)], "epoch": [(7, 1.0)], "eval": [(7, 3.0)]}


def test_log_with_takes_names_objects_and_lists_of_both(tmp_path, monkeypatch):
    mine = tracker_of_the_script()
    assert select_trackers(None) == []
    assert select_trackers("jsonl", tmp_path) == ["jsonl"]
    assert select_trackers(["jsonl", mine, "jsonl"], tmp_path) == ["jsonl", mine]
    with pytest.raises(ValueError, match="Logging with `jsonl` requires a `logging_dir`"):
        select_trackers("jsonl")
    monkeypatch.setattr(tracking, "is_tensorboard_available", lambda: True)
    assert select_trackers(["all", mine], tmp_path) == [mine, "tensorboard"]
    with pytest.warns(UserWarning, match="`logging_dir` is missing"):
        assert select_trackers("all") == [], "without a folder only what needs none"
    monkeypatch.setattr(tracking, "is_tensorboard_available", lambda: False)
    with pytest.raises(ImportError, match="pip install tensorboard"):  # accelerate drops it: the run goes unrecorded
        select_trackers("tensorboard", tmp_path)


def test_a_general_tracker_must_be_complete():
    class Half(GeneralTracker):
        name = "half"

    with pytest.raises(
        NotImplementedError,
        match="Half is missing the following required attributes: `requires_logging_directory`, `tracker`",
    ):
        Half()
    blank = GeneralTracker(_blank=True)
    blank.start()
    blank.log({"loss": 1})
    blank.finish()


@on_a_rank
def log_on_a_rank(folder):
    """The names of the methods of a tracker of the script's own that are called, beside one of JSON lines."""
    mine = tracker_of_the_script()
    accelerator = Accelerator(cpu=True, log_with=["jsonl", mine], project_dir=folder)
    accelerator.init_trackers("run", config={"rank": accelerator.process_index})
    accelerator.log({"rank": accelerator.process_index}, step=accelerator.process_index)
    accelerator.get_tracker("jsonl").log({})  # a blank one elsewhere
    accelerator.end_training()
    return [name for name, *_ in mine.method_calls]


def test_one_process_of_several_writes(tmp_path):
    assert ranks(2).run(log_on_a_rank, str(tmp_path)) == [["store_init_configuration", "log", "finish"], []]
    assert rows(tmp_path / "run.jsonl") == [{"config": {"rank": 0}}, {"step": 0, "rank": 0}, {"step": None}]


def call_decorated_method(accelerator, main_process_only):
    method = mock.Mock()
    on_main_process(method)(SimpleNamespace(main_process_only=main_process_only))
    return method.call_count


@pytest.mark.parametrize("main_process_only, calls", [(True, [1, 0]), (False, [1, 1])])
def test_a_decorated_method_runs_where_its_tracker_says(main_process_only, calls):
    assert on_ranks(2, call_decorated_method, main_process_only) == calls


def end_with_a_tracker_that_has_not_started(accelerator, folder):
    accelerator.trackers.append(JSONLinesTracker("run", folder))
    with pytest.raises(AttributeError):
        accelerator.end_training()
    accelerator.trackers.clear()
    return torch.distributed.is_initialized()


def test_the_group_is_left_also_if_a_tracker_cannot_finish(tmp_path):
    assert on_ranks(2, end_with_a_tracker_that_has_not_started, tmp_path) == [False, False]
