"""What the Trainer costs: at most half of what a tiny step costs in a loop by hand that does the same work.

`benchmarks/suites/overhead.py` measures microseconds; a share of the machine's own step holds on a slow machine too.
"""

import time

import pytest
import torch
import torch.nn.functional as F

from benchmarks.suites.overhead import BATCH, by_hand, by_trainer, data, to_dict
from common.trainer import Trainer, TrainerCallback, TrainingArguments


class LossTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return F.cross_entropy(model(inputs["x"]), inputs["y"])


@pytest.mark.long
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_step_costs_at_most_half_as_much_again_as_by_hand(clip):
    clock = time.process_time  # what other processes do meanwhile is not counted
    rounds = [(by_hand(clip, clock), by_trainer("common.trainer", clip, clock)) for _ in range(24)]
    # The quickest round of each is the one that the rest of the machine disturbed least.
    hand, ours = (min(times) for times in zip(*rounds, strict=True))
    assert ours <= 1.5 * hand, f"{ours * 1e6:.0f} µs against {hand * 1e6:.0f} µs"


def test_no_step_reads_from_the_device(tmp_path, monkeypatch):
    """`item`, `tolist`, `cpu` and truth values make the CPU wait for a GPU: only logging may."""
    reads = []
    for name in ("item", "tolist", "cpu", "__bool__", "__float__", "__int__"):
        original = getattr(torch.Tensor, name)

        def spied(self, *args, name=name, original=original, **kwargs):
            reads.append(name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, spied)

    class Count(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if 2 <= state.global_step < 20:
                assert reads == []
            reads.clear()

    settings = {"save_strategy": "no", "disable_tqdm": True, "remove_unused_columns": False, "use_cpu": True}
    args = TrainingArguments(str(tmp_path), max_steps=20, per_device_train_batch_size=BATCH, optim="sgd", **settings)
    LossTrainer(torch.nn.Linear(16, 10), args, to_dict, data(), callbacks=[Count]).train()
