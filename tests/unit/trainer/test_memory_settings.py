"""Settings that save memory change no bit that they do not change in transformers, on one process and on two."""

import importlib
from pathlib import Path

import pytest
from safetensors.torch import load_file

from common.processes import ranks
from tests.bits import differences, with_digests
from tests.states import on_a_rank
from tests.unit.trainer.both import LIBRARIES, end, make, same_on_both

pytestmark = pytest.mark.usefixtures("transformers")


def outcome(library, folder, settings) -> dict:
    trainer = make(library, folder, eval_strategy="epoch", save_strategy="epoch", **settings)
    trainer.train()
    trained = end(trainer)
    trainer.evaluate()
    checkpoint = Path(folder, f"checkpoint-{trainer.state.global_step}")
    return {
        "after the training": trained,
        "after an evaluation": end(trainer),
        "saved weights": with_digests(load_file(checkpoint / "model.safetensors")),
        "has saved the optimizer": any(checkpoint.glob("optimizer.*")),
    }


@on_a_rank
def outcome_on_a_rank(name, folder, settings) -> dict:
    return outcome(importlib.import_module(name), str(folder / name), settings)


SETTINGS = [{"torch_empty_cache_steps": 2}, {"bf16": True, "bf16_full_eval": True}, {"save_only_model": True}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_on_one_process(settings, tmp_path):
    ours = same_on_both(outcome, tmp_path, settings)
    is_cast = ours["after the training"]["weights"] != ours["after an evaluation"]["weights"]
    assert is_cast == ("bf16_full_eval" in settings)
    assert ours["has saved the optimizer"] == ("save_only_model" not in settings)


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_on_two_processes(settings, tmp_path):
    offline = {"HF_HUB_OFFLINE": "1"}
    outcomes = [ranks(2).run(outcome_on_a_rank, name, tmp_path, settings, environment=offline) for name in LIBRARIES]
    assert list(differences(*outcomes)) == []
