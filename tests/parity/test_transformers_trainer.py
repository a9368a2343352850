"""transformers' own Trainer over the core, by the alias: the weights, losses and metrics that it has on accelerate."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("trainer_script.py")


def train(out: Path, world_size: int, settings: dict, on_the_core: bool) -> list[dict]:
    """What each rank of a run of `trainer_script` leaves behind."""
    out.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    script = ["-m", "tests.alias", str(SCRIPT)] if on_the_core else [str(SCRIPT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    result = subprocess.run(
        [*torchrun, *script, str(out), json.dumps(settings)],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-6000:]
    ranks = []
    for rank in range(world_size):
        left = torch.load(out / f"weights_{rank}.pt", weights_only=True)
        left["log"] = json.loads((out / f"log_{rank}.json").read_text())
        ranks.append(left)
    return ranks


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        pytest.param(1, {"max_grad_norm": 0.1, "warmup_steps": 2}, marks=pytest.mark.long),
        pytest.param(2, {"gradient_accumulation_steps": 3}, marks=pytest.mark.slow),
    ],
)
def test_transformers_trainer_ends_with_the_weights_that_it_has_on_accelerate(tmp_path, world_size, settings):
    theirs = train(tmp_path / "theirs", world_size, settings, on_the_core=False)
    ours = train(tmp_path / "ours", world_size, settings, on_the_core=True)
    for original, core in zip(theirs, ours, strict=True):
        torch.testing.assert_close(core["straight"], original["straight"], rtol=0, atol=0)
        torch.testing.assert_close(core["resumed"], original["resumed"], rtol=0, atol=0)
        torch.testing.assert_close(core["predicted"], original["predicted"], rtol=0, atol=0)
        assert core["log"] == original["log"]
    assert any(entry.get("eval_counted") == 46 for entry in ours[0]["log"])
