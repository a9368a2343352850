"""A small classification task, and a Trainer for it in one call."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from common.trainer import Trainer, TrainerCallback, TrainingArguments


class Points(Dataset):
    """n points in 16 dimensions with labels 0 to 9 that a linear model can learn; samples are dicts."""

    def __init__(self, n: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(n, 16, generator=generator).to(dtype)
        self.labels = (self.x @ torch.randn(16, 10, generator=generator).to(dtype)).argmax(dim=1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict:
        return {"x": self.x[index], "labels": self.labels[index]}


class Net(nn.Module):
    """Linear and dropout; returns its loss if it is given labels."""

    def __init__(self, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 10, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, labels=None):
        logits = self.linear(self.dropout(x))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def accuracy(prediction) -> dict:
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


def seeded_net(**kwargs) -> Net:
    torch.manual_seed(3)
    return Net(**kwargs)


def make_trainer(output_dir, model=None, train=40, evaluate=None, trainer_class=Trainer, extra=None, **arguments):
    """A quiet Trainer that saves nothing unless told; `arguments` go to TrainingArguments, `extra` to the Trainer."""
    settings = {"save_strategy": "no", "use_cpu": True, "learning_rate": 0.05, "num_train_epochs": 1} | arguments
    extra = {"train_dataset": Points(train)} | (extra or {})
    if evaluate is not None:
        extra["eval_dataset"] = Points(evaluate)
    if "model_init" not in extra:
        extra["model"] = seeded_net() if model is None else model
    return trainer_class(args=TrainingArguments(str(output_dir), disable_tqdm=True, **settings), **extra)


def weights(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def trained(output_dir, **kwargs) -> torch.Tensor:
    """The weights after training a Trainer made of `kwargs`."""
    trainer = make_trainer(output_dir, **kwargs)
    trainer.train()
    return weights(trainer)


class CutAt(TrainerCallback):
    """Ends every epoch after so many of the micro-batches that do not end a step."""

    def __init__(self, substeps):
        self.substeps = substeps
        self.seen = 0

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.seen = 0

    def on_substep_end(self, args, state, control, **kwargs):
        self.seen += 1
        control.should_epoch_stop = self.seen == self.substeps


class Spy(TrainerCallback):
    """Calls a function at one event."""

    def __init__(self, event: str, function) -> None:
        self.function = function
        setattr(self, event, self.listen)

    def listen(self, args, state, control, **kwargs):
        return self.function(args=args, state=state, control=control, **kwargs)


def without_timings(log_history: list[dict]) -> list[dict]:
    return [
        {name: value for name, value in entry.items() if not name.endswith(("_runtime", "_per_second"))}
        for entry in log_history
    ]
