"""What the Trainer costs: at most half of what a tiny step costs in a loop by hand that does the same work.

Microseconds are `benchmarks/overhead.py`'s to measure; a share of the machine's own step holds on a slow machine too.
"""

import time

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from common.trainer import Trainer, TrainerCallback, TrainingArguments

STEPS, BATCH = 800, 64


class Stopwatch(TrainerCallback):
    """The time from the end of the first steps to the end of the last one."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == STEPS // 4:
            self.began = time.process_time()
        elif state.global_step == STEPS:
            self.seconds = time.process_time() - self.began


class LossTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return F.cross_entropy(model(inputs["x"]), inputs["y"])


class Batches(TensorDataset):
    """Hands out whole batches, so that loading costs next to nothing."""

    def __getitems__(self, indices):
        return self[indices]


def to_dict(batch):
    return {"x": batch[0], "y": batch[1]}


def data() -> Batches:
    return Batches(torch.randn(STEPS * BATCH, 16), torch.randint(0, 10, (STEPS * BATCH,)))


def optimizer_and_schedule(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def by_hand(clip: float) -> float:
    """Seconds per step of a loop with the same loader, loss, clipping, optimizer and schedule."""
    model = torch.nn.Linear(16, 10)
    optimizer, schedule = optimizer_and_schedule(model)
    loss_sum = torch.zeros((), dtype=torch.float64)
    for step, batch in enumerate(DataLoader(data(), BATCH, shuffle=True, collate_fn=to_dict), start=1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        loss_sum += loss.detach()
        if step == STEPS // 4:
            began = time.process_time()
    return (time.process_time() - began) / (STEPS - STEPS // 4)


def by_trainer(clip: float, folder, trainer_class=LossTrainer, arguments=TrainingArguments, extra=None) -> float:
    model = torch.nn.Linear(16, 10)
    settings = {"per_device_train_batch_size": BATCH, "num_train_epochs": 1, "max_grad_norm": clip, "use_cpu": True}
    settings |= {"save_strategy": "no", "disable_tqdm": True, "remove_unused_columns": False, "report_to": "none"}
    stopwatch = Stopwatch() if extra is None else extra
    trainer = trainer_class(
        model, arguments(str(folder), **settings), to_dict, data(),
        callbacks=[stopwatch], optimizers=optimizer_and_schedule(model),
    )  # fmt: skip
    trainer.train()
    return stopwatch.seconds / (STEPS - STEPS // 4)


@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_step_costs_at_most_half_as_much_again_as_by_hand(clip, tmp_path):
    rounds = [(by_hand(clip), by_trainer(clip, tmp_path)) for _ in range(12)]
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
