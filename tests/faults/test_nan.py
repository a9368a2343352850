"""A loss that is not finite stops the run, with step and rank, and what was saved before stays."""

import re
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_post_hook

from common import ladder
from common.args import parse_args
from common.errors import UserError
from common.processes import ranks
from common.run.metrics import LossWatch

SHORT = ["--dataset", "synthetic", "--train-samples", "960", "--eval-samples", "100", "--batch-size", "96"]
TOO_FAST = [*SHORT, "--lr", "1e30"]  # after the first step the weights are huge, and the second loss is NaN


def failure(level: str, flags: list[str]) -> str:
    module = ladder.load(level)
    try:
        with mock.patch("common.errors.time"):  # in which rank 0 would speak and end the others
            module.train(parse_args(module.__file__, flags))
    except UserError as error:
        return str(error)
    return "no failure"


@pytest.mark.parametrize("level", ["00_single_gpu", "01_data_parallel"])
def test_one_process_stops_and_says_at_which_step(level, capsys):
    assert failure(level, TOO_FAST) == "loss is not finite (nan) at step 2 on rank 0"
    assert capsys.readouterr().err.splitlines()[-1] == "error: loss is not finite (nan) at step 2 on rank 0"


@pytest.mark.parametrize("level", ladder.DISTRIBUTED)
def test_every_rank_stops_at_the_same_step(level):
    said = ranks(2).run(failure, level, TOO_FAST)
    assert said == [f"loss is not finite (nan) at step 2 on rank {rank}" for rank in range(2)]


@pytest.mark.parametrize("level", ladder.with_checkpoints())
def test_with_accumulation_the_step_is_that_of_the_optimizer(level):
    said = failure(level, [*TOO_FAST, "--gradient-accumulation-steps", "3"])
    assert said == "loss is not finite (nan) at step 2 on rank 0"


@pytest.mark.parametrize("level", ladder.with_checkpoints())
def test_no_checkpoint_holds_weights_that_are_lost(level, tmp_path):
    saving = ["--checkpoint-dir", str(tmp_path), "--checkpoint-every", "1"]
    assert re.search(r"not finite \(nan\) at step 2 ", failure(level, [*TOO_FAST, *saving]))
    saved = list(tmp_path.rglob("model.safetensors"))
    assert len(saved) == 1
    assert all(tensor.isfinite().all() for tensor in load_file(saved[0]).values())


@pytest.mark.parametrize("level", ladder.with_checkpoints())
def test_weights_that_are_lost_though_the_loss_was_finite_are_not_saved_either(level, tmp_path):
    steps = []

    def lose_the_third(optimizer, *_):
        steps.append(len(steps) + 1)
        if len(steps) == 3:
            optimizer.param_groups[0]["params"][-1].data[0] = float("nan")

    losing = register_optimizer_step_post_hook(lose_the_third)
    try:
        said = failure(level, [*SHORT, "--checkpoint-dir", str(tmp_path), "--checkpoint-every", "1"])
    finally:
        losing.remove()
    assert said.startswith("the weights are not finite after step 3") and steps == [1, 2, 3]
    saved = list(tmp_path.rglob("model.safetensors"))
    assert len(saved) == 2
    assert all(tensor.isfinite().all() for path in saved for tensor in load_file(path).values())


def test_one_lost_loss_among_many_is_found_with_its_step_without_a_look_at_every_step(monkeypatch):
    """As on a GPU, where a look would wait for it: here the tensors count how often one of them is read."""
    reads = []
    monkeypatch.setattr(torch.Tensor, "item", lambda self: reads.append(self))
    for bad, found in ((5, 20), (10, 20), (11, 30)):
        watch = LossWatch(torch.device("cpu"), rank=3)
        watch.reads_at_once = False
        with pytest.raises(UserError, match=f"at step {bad} on rank 3"):
            for step in range(1, 100):
                last = step
                watch.note(torch.tensor(float("inf") if step == bad else 1.0), step)
        assert last == found
    watch = LossWatch(torch.device("cpu"), rank=0)
    watch.reads_at_once = False
    for step in range(1, 26):
        watch.note(torch.tensor(float("nan") if step == 25 else 1.0), step)
    with pytest.raises(UserError, match="at step 25 on rank 0"):
        watch.settle()
    assert reads == []
