"""Settings that save memory change no bit that they do not change in transformers, on one process and on two."""

import importlib
from pathlib import Path

import pytest
from safetensors.torch import load_file

from common.processes import ranks
from tests.bits import differences, with_digests
from tests.states import on_a_rank
from tests.unit.trainer.both import LIBRARIES, end, make


@on_a_rank
def outcome(name, folder, settings) -> dict:
    trainer = make(
        importlib.import_module(name), str(folder / name), eval_strategy="epoch", save_strategy="epoch", **settings
    )
    trainer.train()
    trained = end(trainer)
    trainer.evaluate()
    checkpoint = Path(trainer.args.output_dir, f"checkpoint-{trainer.state.global_step}")
    return {
        "after the training": trained,
        "after an evaluation": end(trainer),
        "saved weights": with_digests(load_file(checkpoint / "model.safetensors")),
        "has saved the optimizer": any(checkpoint.glob("optimizer.*")),
    }


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "settings", [{"torch_empty_cache_steps": 2}, {"bf16": True, "bf16_full_eval": True}, {"save_only_model": True}]
)
def test_settings_of_memory_end_with_the_bits_of_the_original(settings, processes, tmp_path, transformers):
    offline = {"HF_HUB_OFFLINE": "1"}
    ours, theirs = [ranks(processes).run(outcome, name, tmp_path, settings, environment=offline) for name in LIBRARIES]
    assert list(differences(ours, theirs)) == []
    first, *_ = ours
    is_cast = first["after the training"]["weights"] != first["after an evaluation"]["weights"]
    assert is_cast == ("bf16_full_eval" in settings)
    assert first["has saved the optimizer"] == ("save_only_model" not in settings)
