"""A step lets the CPU run ahead of a GPU. What a step costs is measured by `benchmarks/suites/overhead.py`."""

import torch

from common.trainer import TrainerCallback
from tests.unit.trainer.toy import make_trainer


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

    make_trainer(tmp_path, train=160, optim="sgd", extra={"callbacks": [Count]}).train()
