"""A script that is run with the Trainer of either library, and what it came to, bit for bit."""

import importlib

import torch

from tests.parity.random_trainers import comparable_logs, digest, reset
from tests.toys import Points, seeded_net

LIBRARIES = ("common.trainer", "transformers")


def on_both(script, folder, *args) -> tuple:
    """What `script` returns for our library and for theirs, each as in a new process."""
    outcomes = []
    for name in LIBRARIES:
        torch.manual_seed(11)
        outcomes.append(script(importlib.import_module(name), str(folder / name), *args))
        reset(name)
    return tuple(outcomes)


def same_on_both(script, folder, *args):
    """What `script` returns for our library, which is what it returns for theirs."""
    ours, theirs = on_both(script, folder, *args)
    assert ours == theirs
    return ours


def make(library, folder, trainer_class=None, extra=None, **arguments):
    """A Trainer of `library` that logs every step."""
    settings = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    settings |= {"learning_rate": 0.05, "num_train_epochs": 2, "logging_steps": 1} | arguments
    data = {"train_dataset": Points(22), "eval_dataset": Points(16)}
    model = {"model": seeded_net(dropout=0.3)}
    args = library.TrainingArguments(folder, **settings)
    return (trainer_class or library.Trainer)(args=args, **(model | data | (extra or {})))


def end(trainer) -> dict:
    """All that a training came to."""
    return {
        "weights": {name: digest(tensor) for name, tensor in trainer.model.state_dict().items()},
        "logs": comparable_logs(trainer.state.log_history),
        "steps": (trainer.state.global_step, trainer.state.max_steps, trainer.state.epoch),
        "next_random_number": torch.rand(()).item(),
    }


def train(*args, **arguments) -> dict:
    """What a training came to by a Trainer that is made like this."""
    trainer = make(*args, **arguments)
    trainer.train()
    return end(trainer)
