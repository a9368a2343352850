"""A Trainer for the small classification task in one call, and what its tests compare."""

import torch

import common.trainer
from common.trainer import TrainerCallback
from tests.toys import Net, Points, loss_per_item, seeded_net

EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))


class Junk(Points):
    def __getitem__(self, index):
        return super().__getitem__(index) | {"junk": "text"}


class CountingNet(Net):
    """Divides the loss of its labels by the number of items, as the models of transformers do."""

    def forward(self, x, labels=None, **kwargs):
        outputs = super().forward(x)
        return outputs if labels is None else outputs | {"loss": loss_per_item(outputs, labels, **kwargs)}


def accuracy(prediction) -> dict:
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


def make_trainer(
    output_dir,
    *,
    model=None,
    train=40,
    evaluate=None,
    trainer_class=None,
    extra=None,
    library=common.trainer,
    **arguments,
):
    """A quiet Trainer that saves nothing unless told; `arguments` go to TrainingArguments, `extra` to the Trainer.

    Without a `model` it trains `seeded_net()`; 40 points are five steps an epoch. `extra` may have other data sets.
    """
    extra = extra or {}
    assert "model" not in extra
    settings = {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    settings |= {"learning_rate": 0.05, "num_train_epochs": 1} | arguments
    pieces = {"model": seeded_net() if model is None else model, "train_dataset": Points(train)}
    if evaluate is not None:
        pieces["eval_dataset"] = Points(evaluate)
    args = library.TrainingArguments(str(output_dir), **settings)
    return (trainer_class or library.Trainer)(args=args, **(pieces | extra))


def weights(trainer) -> torch.Tensor:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in trainer.model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


def trained_weights(output_dir, **kwargs) -> torch.Tensor:
    trainer = make_trainer(output_dir, **kwargs)
    trainer.train()
    return weights(trainer)


class At(TrainerCallback):
    """Calls `action` with the control the `count`-th time that `event` happens."""

    def __init__(self, event: str, count: int, action) -> None:
        self.left = count
        self.action = action
        setattr(self, event, self.strike)

    def strike(self, args, state, control, **kwargs):
        self.left -= 1
        if self.left == 0:
            self.action(control)


def stop(control) -> None:
    control.should_training_stop = True


def save_and_stop(control) -> None:
    control.should_save = True
    control.should_training_stop = True
