"""A Trainer for the small classification task in one call, and what its tests compare."""

import torch

from common.trainer import Trainer, TrainerCallback, TrainingArguments
from tests.toys import Points, seeded_net


def accuracy(prediction) -> dict:
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


def make_trainer(output_dir, model=None, train=40, evaluate=None, trainer_class=Trainer, extra=None, **arguments):
    """A quiet Trainer that saves nothing unless told; `arguments` go to TrainingArguments, `extra` to the Trainer."""
    settings = {"save_strategy": "no", "use_cpu": True, "learning_rate": 0.05, "num_train_epochs": 1} | arguments
    extra = {"train_dataset": Points(train)} | (extra or {})
    if evaluate is not None:
        extra["eval_dataset"] = Points(evaluate)
    model = seeded_net() if model is None else model
    return trainer_class(model, TrainingArguments(str(output_dir), disable_tqdm=True, **settings), **extra)


def weights(trainer) -> torch.Tensor:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in trainer.model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


def trained(output_dir, **kwargs) -> torch.Tensor:
    """The weights after training a Trainer made of `kwargs`."""
    trainer = make_trainer(output_dir, **kwargs)
    trainer.train()
    return weights(trainer)


def without_timings(log_history: list[dict]) -> list[dict]:
    return [
        {name: value for name, value in entry.items() if not name.endswith(("_runtime", "_per_second"))}
        for entry in log_history
    ]


class StopAt(TrainerCallback):
    """Stops the training at the `count`-th time that `event` happens, after a checkpoint if `saves`."""

    def __init__(self, event: str, count: int, saves: bool = False) -> None:
        self.left = count
        self.saves = saves
        setattr(self, event, self.strike)

    def strike(self, args, state, control, **kwargs):
        self.left -= 1
        if self.left == 0:
            control.should_training_stop = True
            control.should_save = control.should_save or self.saves
