"""Level 04's files on Hugging Face's Trainer: the same weights, log keys, and keys in trainer_state.json."""

import json
from pathlib import Path

import pytest
import torch

from common import ladder
from common.processes import ranks
from common.weights import max_weight_difference
from tests.levels import EXACT, changed_script, run_level, run_module
from tests.states import on_a_rank

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("transformers")]


def switched_script(folder: Path, level: str = "04_trainer") -> Path:
    return changed_script(level, folder, "common.trainer import", "transformers import")


@pytest.mark.parametrize("accumulation", [1, 3])
def test_level_04_runs_on_it_with_the_import_switched(accumulation, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = [*EXACT, "--gradient-accumulation-steps", str(accumulation), "--checkpoint-every", "2"]
    ends = []
    level = "04_trainer/train_full"
    modules = {"ours": ladder.load(level), "theirs": ladder.load(level, switched_script(tmp_path, level))}
    for name, module in modules.items():
        result, weights = run_module(module, [*argv, "--checkpoint-dir", str(tmp_path / name)])
        state = json.loads((tmp_path / name / f"checkpoint-{result['steps']}" / "trainer_state.json").read_text())
        ends.append((result, weights, state))
    (result, weights, state), (their_result, their_weights, their_state) = ends
    assert max_weight_difference(weights, their_weights) <= 1e-9
    for key in ("steps", "evaluated", "accuracy", "world_size"):
        assert result[key] == their_result[key]
    for key in ("loss", "eval_loss"):
        assert result[key] == pytest.approx(their_result[key], rel=1e-5)  # theirs are summed in float32
    assert state.keys() == their_state.keys()
    assert [entry.keys() for entry in state["log_history"]] == [entry.keys() for entry in their_state["log_history"]]


@on_a_rank
def train(argv, path=None):
    """Level 04's result and weights, or those of another version of its file."""
    return run_level("04_trainer", argv, path)


def test_level_04_on_two_processes_ends_with_its_bits(tmp_path):
    argv = [*EXACT, "--eval-samples", "24"]
    outcomes = ranks(2).run(train, argv)
    offline = {"HF_HUB_OFFLINE": "1"}
    theirs = ranks(2).run(train, argv, switched_script(tmp_path), environment=offline)
    for (result, _), (their_result, _) in zip(outcomes, theirs, strict=True):
        for key in ("steps", "evaluated", "accuracy", "world_size"):
            assert result[key] == their_result[key]
    (_, weights), (_, their_weights) = outcomes[0], theirs[0]
    assert weights.keys() == their_weights.keys()
    assert all(torch.equal(weights[name], their_weights[name]) for name in weights)
