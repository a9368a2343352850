"""A script that is run with the Trainer of either library, and its outcome, bit for bit."""

import importlib

import torch

from tests.bits import comparable_logs, differences, with_digests
from tests.states import forget_states
from tests.toys import seeded_net
from tests.unit.trainer.toy import make_trainer

LIBRARIES = ("common.trainer", "transformers")


def on_both(script, folder, *args) -> tuple:
    """The results of `script` for our library and for theirs, each as in a new process."""
    outcomes = []
    for name in LIBRARIES:
        outcomes.append(script(importlib.import_module(name), str(folder / name), *args))
        forget_states()
    return tuple(outcomes)


def same_on_both(script, folder, *args):
    """The result of `script` for our library, which must equal that for theirs."""
    ours, theirs = on_both(script, folder, *args)
    assert list(differences(ours, theirs)) == []
    return ours


def make(library, folder, *, model=None, **arguments):
    """A Trainer of `library` that logs every step: 22 samples in batches of 8 (3 steps an epoch), 2 epochs, dropout."""
    if model is None:
        model = seeded_net(dropout=0.3)
    settings = {"train": 22, "evaluate": 16, "num_train_epochs": 2, "logging_steps": 1} | arguments
    return make_trainer(folder, library=library, model=model, **settings)


def end(trainer) -> dict:
    return {
        "weights": with_digests(dict(trainer.model.state_dict())),
        "logs": comparable_logs(trainer.state.log_history),
        "global_step": trainer.state.global_step,
        "max_steps": trainer.state.max_steps,
        "epoch": trainer.state.epoch,
        "next_random_number": torch.rand(()).item(),
    }


def train(*args, **arguments) -> dict:
    trainer = make(*args, **arguments)
    trainer.train()
    return end(trainer)
