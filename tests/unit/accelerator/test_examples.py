"""The examples of level 03: a few steps of each, on this core and on the real library."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from common.processes import ranks
from tests.states import forget_states

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "03_accelerate" / "examples"
CIFAR = ["--dataset", "synthetic", "--batch-size", "2", "--samples", "7", "--max-steps", "2", "--log-every", "1"]
WIDE = ["--dataset", "synthetic", "--batch-size", "4", "--train-samples", "9", "--eval-samples", "7"]
WIDE += ["--epochs", "2"]


def _run(path: str, arguments: list[str]) -> dict:
    """Import the example by path, run it as its own `main` would, and return what `train` returned."""
    spec = importlib.util.spec_from_file_location("example", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    results, train = [], example.train
    example.train = lambda args: results.append(train(args))
    argv, sys.argv = sys.argv, [path, *arguments]
    try:
        example.main()
    finally:
        sys.argv = argv
        forget_states()
    return results[0]


def _flags(path: str, arguments: list[str]) -> argparse.Namespace:
    """The flags of the example, as its `main` hands them to `train`."""
    with mock.patch.object(sys, "argv", [path, *arguments]):
        spec = importlib.util.spec_from_file_location("example", path)
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        example.train = mock.Mock()
        example.main()
        return example.train.call_args.args[0]


def test_wide_net_looks_for_mnist_where_the_levels_do(monkeypatch):
    monkeypatch.setenv("MNIST_ROOT", "/elsewhere")
    assert _flags(str(EXAMPLES / "wide_net.py"), []).data_dir == "/elsewhere"
    assert _flags(str(EXAMPLES / "wide_net.py"), ["--data-dir", "here"]).data_dir == "here"


@pytest.mark.slow
def test_cifar_says_that_it_trains_on_noise(tmp_path, caplog):
    where = ["--data-dir", str(tmp_path / "none"), "--output-dir", str(tmp_path)]
    _run(str(EXAMPLES / "cifar_resnet18.py"), [*CIFAR, "--dataset", "auto", *where])
    assert caplog.text.count(f"NOT CIFAR-10: it is not in {tmp_path}/none. Training on coloured noise") == 1


def weights(path: Path) -> dict:
    return torch.load(path, weights_only=True)


@pytest.mark.slow
def test_cifar_counts_every_image_and_writes_what_it_promises(tmp_path):
    from safetensors.torch import load_file

    arguments = [*CIFAR, "--tracker", "jsonl", "--output-dir", str(tmp_path)]
    results = ranks(2).run(_run, str(EXAMPLES / "cifar_resnet18.py"), arguments)
    assert all(result["evaluated"] == 7 and result["steps"] == 2 for result in results)
    assert len({result["correct"] for result in results}) == 1
    rows = [json.loads(line) for line in (tmp_path / "cifar_resnet18.jsonl").read_text().splitlines()]
    assert rows[0]["config"]["batch_size"] == 2
    assert [(row["step"], sorted(row)) for row in rows[1:]] == [
        (1, ["loss", "step"]),
        (2, ["loss", "step"]),
        (2, ["accuracy", "epoch", "step"]),
    ]
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["conv1.weight"].shape == (64, 3, 3, 3) and not any(name.startswith("module.") for name in saved)


@pytest.mark.parametrize("world_size, scheduler", [(2, "onecycle"), pytest.param(1, "step", marks=pytest.mark.slow)])
def test_wide_net_keeps_a_checkpoint_per_epoch_and_the_best(tmp_path, world_size, scheduler):
    arguments = [*WIDE, "--scheduler", scheduler, "--output-dir", str(tmp_path)]
    results = ranks(world_size).run(_run, str(EXAMPLES / "wide_net.py"), arguments)
    assert all(result["evaluated"] == 7 and result["steps"] == 4 for result in results)
    assert all(result["accuracy"] == result["best"] for result in results), "the best weights were read back"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.pt", "epoch_0.pt", "epoch_1.pt"]
    first, second, best = (weights(tmp_path / name) for name in ("epoch_0.pt", "epoch_1.pt", "best.pt"))
    assert list(first) == [f"{layer}.{kind}" for layer in (0, 2, 7, 9) for kind in ("weight", "bias")]
    assert not torch.equal(first["9.bias"], second["9.bias"])
    assert any(torch.equal(best["9.bias"], other["9.bias"]) for other in (first, second))


@pytest.mark.parametrize(
    "name, arguments",
    [
        pytest.param("cifar_resnet18", CIFAR, marks=pytest.mark.slow),
        pytest.param("wide_net", WIDE, marks=pytest.mark.long),
    ],
)
def test_the_same_file_runs_on_the_real_library(tmp_path, name, arguments):
    pytest.importorskip("accelerate")
    theirs = tmp_path / "theirs.py"
    text = (EXAMPLES / f"{name}.py").read_text()
    theirs.write_text(text.replace("common.accelerator", "accelerate"))
    assert "from accelerate import Accelerator" in theirs.read_text()
    result = subprocess.run(
        [sys.executable, theirs, *arguments, "--output-dir", tmp_path / "out"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    assert any((tmp_path / "out").iterdir())
