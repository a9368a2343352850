"""Trackers: what log_with accepts, what each writes, and that one process writes it."""

import json
import math
import subprocess
import sys
import types

import numpy
import pytest
import torch

from common.accelerator import Accelerator, tracking
from common.accelerator.state import PartialState
from common.accelerator.tracking import (
    GeneralTracker,
    JSONLinesTracker,
    SwanLabTracker,
    TensorBoardTracker,
    get_available_trackers,
    on_main_process,
    select_trackers,
)
from tests.workers import ranks


@pytest.fixture(autouse=True)
def clean():
    shared = PartialState._shared_state
    PartialState._reset_state()
    PartialState(cpu=True)
    yield
    PartialState._shared_state = shared


class Mine:
    """Derives from nothing and has the tracker's methods."""

    name, calls = "mine", 0

    def store_init_configuration(self, values):
        self.calls += 1

    def log(self, values, step=None, **kwargs):
        self.calls += 1

    def finish(self):
        self.calls += 1


def rows(path) -> list[dict]:
    def strict(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=strict) for line in path.read_text().splitlines()]


def test_json_lines_hold_the_configuration_and_every_step(tmp_path):
    tracker = JSONLinesTracker("run", tmp_path / "logs")
    assert not (tmp_path / "logs").exists(), "nothing is opened before start"
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1, "layers": [1, 2], "resume": None})
    tracker.log({"loss": torch.tensor(0.5), "accuracy": numpy.float32(0.25)}, step=3)
    path = tmp_path / "logs" / "run.jsonl"
    expected = [
        {"config": {"lr": 0.1, "layers": [1, 2], "resume": None}},
        {"step": 3, "loss": 0.5, "accuracy": 0.25},
    ]
    assert rows(path) == expected, "on disk before finish"
    tracker.log({"loss": math.nan, "worst": -math.inf, "note": "é\n"})
    tracker.finish()
    assert rows(path)[2:] == [{"step": None, "loss": "nan", "worst": "-inf", "note": "é\n"}]
    assert math.isnan(float(rows(path)[2]["loss"]))

    resumed = JSONLinesTracker("run", tmp_path / "logs")
    resumed.start()
    resumed.log({"loss": 0.1}, step=4)
    resumed.finish()
    assert rows(path)[:2] == expected and len(rows(path)) == 4


def test_tensorboard_writes_scalars_text_and_hyperparameters(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (cls,) = select_trackers("tensorboard", tmp_path)
    tracker = cls("run", tmp_path)
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1, "resume": None})
    for step in range(3):
        tracker.log({"loss": torch.tensor(1.0 / (step + 1)), "note": "text"}, step=step)
    tracker.log({"both": {"train": 1.0, "eval": 2.0}}, step=3)
    assert type(tracker.tracker).__name__ == "SummaryWriter"
    tracker.finish()
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (0, 1.0), (1, 0.5), (2, pytest.approx(1 / 3))
    ]  # fmt: skip
    assert "note/text_summary" in events.Tags()["tensors"]
    assert (tmp_path / "run" / "both_train").is_dir()


def test_swanlab_is_called_as_its_documentation_says(monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda values, step=None, **kwargs: calls.append(("log", values, step, kwargs)),
        finish=lambda: calls.append(("finish",)),
    )
    swanlab = types.ModuleType("swanlab")
    swanlab.init = lambda project, **kwargs: (calls.append(("init", project, kwargs)), run)[1]
    swanlab.config = types.SimpleNamespace(update=lambda values, **kwargs: calls.append(("config", values, kwargs)))
    monkeypatch.setitem(sys.modules, "swanlab", swanlab)
    tracker = SwanLabTracker("project", mode="local")
    assert calls == []
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": torch.tensor(0.5)}, step=1, print_to_console=True)
    tracker.finish()
    assert calls == [
        ("init", "project", {"mode": "local"}),
        ("config", {"lr": 0.1}, {"allow_val_change": True}),
        ("log", {"loss": 0.5}, 1, {"print_to_console": True}),
        ("finish",),
    ]
    assert tracker.tracker is run


@pytest.mark.slow
def test_swanlab_for_real(tmp_path):
    pytest.importorskip("swanlab")
    tracker = SwanLabTracker("project", mode="offline", logdir=str(tmp_path))
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": 0.5}, step=1)
    tracker.finish()
    assert any(tmp_path.iterdir())


def test_log_with_takes_names_objects_and_lists_of_both(tmp_path):
    mine = Mine()
    assert select_trackers(None) == []
    assert select_trackers([]) == []
    assert select_trackers("jsonl", tmp_path) == [JSONLinesTracker]
    assert select_trackers(mine) == [mine]
    assert select_trackers(["jsonl", mine, "jsonl"], tmp_path) == [JSONLinesTracker, mine]
    assert select_trackers(("all", mine), tmp_path)[-1] is mine


def test_all_means_what_is_installed_and_can_work_here(tmp_path, monkeypatch):
    available = [tracking.LOGGER_TYPE_TO_CLASS[name] for name in get_available_trackers()]
    assert JSONLinesTracker in available and select_trackers("all", tmp_path) == available
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: object() if name == "swanlab" else None)
    assert get_available_trackers() == ["jsonl", "swanlab"]
    assert select_trackers("all") == [SwanLabTracker], "without a folder only what needs none"


def test_a_missing_package_is_named_with_its_installation(tmp_path, monkeypatch):
    """accelerate drops the tracker silently and the run goes unrecorded."""
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    for name in ("tensorboard", "swanlab"):
        with pytest.raises(ImportError, match=f"pip install {name}"):
            select_trackers(name, tmp_path)


@pytest.mark.parametrize(
    "log_with, error, message",
    [
        ("tensorbord", ValueError, "unknown tracker 'tensorbord': choose all, jsonl, tensorboard, swanlab"),
        ("jsonl", ValueError, "log_with='jsonl' writes files: give the Accelerator a project_dir or a logging_dir"),
    ],
)
def test_what_log_with_refuses(log_with, error, message):
    with pytest.raises(error) as raised:
        select_trackers(log_with)
    assert message in str(raised.value)


def test_a_general_tracker_must_be_complete():
    class Half(GeneralTracker):
        name = "half"

    with pytest.raises(NotImplementedError, match="Half must define requires_logging_directory, tracker"):
        Half()
    blank = GeneralTracker(_blank=True)
    blank.start(), blank.log({"loss": 1}), blank.finish()


@pytest.mark.slow
def test_nothing_is_imported_until_it_is_used():
    code = "import sys, common.accelerator.tracking; print([m for m in sys.modules if m in ('tensorboard', 'swanlab')])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


class Everywhere(GeneralTracker):
    name, requires_logging_directory, tracker = "everywhere", False, None

    def __init__(self, main_process_only):
        super().__init__()
        self.main_process_only, self.calls = main_process_only, 0

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.calls += 1


def _log_on_every_rank(folder):
    mine = Mine()
    accelerator = Accelerator(cpu=True, log_with=["jsonl", mine], project_dir=folder)
    accelerator.init_trackers("run", config={"rank": accelerator.process_index})
    accelerator.log({"rank": accelerator.process_index}, step=accelerator.process_index)
    once, everywhere = Everywhere(True), Everywhere(False)
    for each in (once, everywhere):
        each.log({})
    accelerator.get_tracker("jsonl").log({})  # a blank one elsewhere
    accelerator.end_training()
    PartialState._reset_state()
    return mine.calls, once.calls, everywhere.calls


def test_one_process_of_several_writes(tmp_path):
    assert ranks(2).run(_log_on_every_rank, str(tmp_path)) == [(3, 1, 1), (0, 0, 1)]
    assert rows(tmp_path / "run.jsonl") == [{"config": {"rank": 0}}, {"step": 0, "rank": 0}, {"step": None}]


def test_tensorboard_events_equal_accelerates(tmp_path):
    theirs = pytest.importorskip("accelerate.tracking")
    pytest.importorskip("tensorboard")
    from accelerate.state import PartialState as TheirState
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    TheirState(cpu=True)
    scalars = []
    for module, name in ((theirs, "theirs"), (tracking, "ours")):
        tracker = module.TensorBoardTracker(name, str(tmp_path))
        tracker.start()
        tracker.log({"loss": 0.5, "epoch": 1}, step=7)
        tracker.finish()
        events = EventAccumulator(str(tmp_path / name)).Reload()
        tags = events.Tags()["scalars"]
        scalars.append({tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags})
    TheirState._reset_state()
    assert scalars[0] == scalars[1] == {"loss": [(7, 0.5)], "epoch": [(7, 1.0)]}
    assert TensorBoardTracker.requires_logging_directory is theirs.TensorBoardTracker.requires_logging_directory
