"""The examples of level 03: a few steps of each, on this core and on the real library."""

import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from common import ladder
from common.accelerator.utils import FullyShardedDataParallelPlugin
from common.memory import track_memory
from common.processes import ranks
from tests.levels import changed_script
from tests.peers import import_or_skip
from tests.states import ONE_THREAD, forget_states
from tests.unit.accelerator.several_processes import on_ranks

EXAMPLES = ladder.ROOT / "03_accelerate" / "examples"
WIDE = ["--dataset", "synthetic", "--batch-size", "4", "--train-samples", "9", "--eval-samples", "7"]
WIDE += ["--epochs", "2"]
GPT = ["--max-steps", "3", "--batch-size", "8", "--length", "32"]


def run(path: Path, arguments: list[str]) -> dict:
    """Run the example as its own `main` would, and return what `train` returned."""
    example = ladder.load("example", path)
    train = example.train
    results = []
    example.train = lambda args: results.append(train(args))
    try:
        with mock.patch.object(sys, "argv", [str(path), *arguments]):
            example.main()
    finally:
        forget_states()
    return results[0]


@pytest.mark.parametrize("world_size, scheduler", [(2, "onecycle"), pytest.param(1, "step", marks=pytest.mark.slow)])
def test_wide_net_keeps_a_checkpoint_per_epoch_and_the_best(tmp_path, world_size, scheduler):
    arguments = [*WIDE, "--scheduler", scheduler, "--output-dir", str(tmp_path)]
    results = ranks(world_size).run(run, EXAMPLES / "wide_net.py", arguments)
    assert all(result["evaluated"] == 7 and result["steps"] == 4 for result in results)
    assert all(result["accuracy"] == result["best"] for result in results), "the best weights were read back"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.pt", "epoch_0.pt", "epoch_1.pt"]
    names = ("epoch_0.pt", "epoch_1.pt", "best.pt")
    first, second, best = (torch.load(tmp_path / name, weights_only=True) for name in names)
    assert list(first) == [f"{layer}.{kind}" for layer in (0, 2, 7, 9) for kind in ("weight", "bias")]
    assert not torch.equal(first["9.bias"], second["9.bias"])
    assert any(torch.equal(best["9.bias"], other["9.bias"]) for other in (first, second))


def on_the_original(name: str, folder: Path) -> Path:
    import_or_skip("accelerate")
    path = changed_script(f"03_accelerate/examples/{name}", folder, "common.accelerator", "accelerate")
    assert "from accelerate import Accelerator" in path.read_text()
    return path


@pytest.mark.parametrize("world_size", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_tiny_gpt_learns_alike_by_ddp_and_by_fsdp(tmp_path, world_size):
    from safetensors.torch import load_file

    path = EXAMPLES / "tiny_gpt.py"
    theirs = on_the_original("tiny_gpt", tmp_path)
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    fsdp["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "Block"

    job = ranks(world_size)
    saving = [*GPT, "--checkpointing", "--log-every", "1", "--tracker", "jsonl", "--output-dir", str(tmp_path)]
    ours = job.run(run, path, GPT, environment=ONE_THREAD)[0]
    sharded = job.run(run, path, saving, environment=ONE_THREAD | fsdp)[0]
    original = job.run(run, theirs, [*GPT, "--pages", str(ladder.ROOT)], environment=ONE_THREAD)[0]
    assert ours == original and ours["losses"][2] < ours["losses"][0]
    assert sharded["losses"] == pytest.approx(ours["losses"], rel=1e-6)
    rows = [json.loads(line) for line in (tmp_path / "tiny_gpt.jsonl").read_text().splitlines()]
    assert rows[0]["config"]["batch_size"] == 8 and [row["loss"] for row in rows[1:]] == sharded["losses"]
    saved = load_file(tmp_path / "model.safetensors")
    assert "letters.weight" in saved and "head.weight" not in saved, "tied weights are in the file once"
    assert saved["blocks.0.project.weight"].shape == (128, 128)


def train_tiny_gpt(accelerator):
    """MiB of parameters and optimizer state after a step."""
    example = ladder.load("03_accelerate/examples/tiny_gpt")
    with track_memory() as tracker:
        model = example.TinyGPT(length=96)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        lines = torch.ones(2, 9, dtype=torch.int64).to("cpu")
        accelerator.backward(example.mean_loss(accelerator, model, lines))
        optimizer.step()
        held = tracker.now(0)
    return [f"{held[kind] / 2**20:.1f}" for kind in ("parameters", "optimizer state")]


def test_the_page_says_what_each_rank_holds_of_tiny_gpt():
    blocks = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": "Block"}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **blocks)
    ddp = on_ranks(2, train_tiny_gpt)
    fsdp = on_ranks(2, train_tiny_gpt, fsdp_plugin=plugin)
    page = (EXAMPLES / "README.md").read_text()
    for rank in range(2):
        for kind, copied, part in zip(("parameters", "optimizer state"), ddp[rank], fsdp[rank], strict=True):
            assert f"| {kind} | {copied} | {part} |" in page
