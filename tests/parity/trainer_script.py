"""A training with transformers' own Trainer, for whichever library answers to `accelerate`.

Started by test_transformers_trainer.py; prints nothing, and leaves in OUT, from each rank, the weights, the losses and
the metrics. Imports nothing of this repository.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

SAMPLES = 46  # the last batch is short, and the last window of accumulation too


class Regression(nn.Module):
    """Two layers with dropout, in the form that the Trainer expects: a dict with the loss and the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, 8)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.dropout(torch.tanh(self.hidden(inputs))))
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


class StopAt(TrainerCallback):
    """Ends the training at a step, as a preemption would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def samples(seed: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    labels = inputs.sum(1, keepdim=True) + torch.randn(SAMPLES, 1, generator=generator)
    return [{"inputs": row, "labels": label} for row, label in zip(inputs, labels, strict=True)]


def metrics(prediction) -> dict[str, float]:
    errors = prediction.predictions - prediction.label_ids
    return {"error": float(abs(errors).mean()), "counted": float(len(errors))}


def without_times(entry: dict) -> dict:
    return {key: value for key, value in entry.items() if "runtime" not in key and "second" not in key}


def build(out: Path, settings: dict, callbacks: list[TrainerCallback]) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(out / "checkpoints"),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=5,
        learning_rate=0.05,
        eval_strategy="epoch",
        save_strategy="steps",
        save_steps=4,
        logging_steps=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
        **settings,
    )
    torch.set_num_threads(1)  # The core shares the cores out over the processes, where accelerate leaves one thread.
    return Trainer(
        model=Regression(),
        args=arguments,
        train_dataset=samples(0),
        eval_dataset=samples(1),
        compute_metrics=metrics,
        callbacks=callbacks,
    )


def main(out: Path, settings: dict) -> None:
    torch.manual_seed(0)
    trainer = build(out / "straight", settings, [])
    trainer.train()
    straight = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    log = trainer.state.log_history
    predicted = trainer.predict(samples(2))

    torch.manual_seed(0)
    build(out / "resumed", settings, [StopAt(4)]).train()
    torch.manual_seed(1)
    resumed = build(out / "resumed", settings, [])
    resumed.train(resume_from_checkpoint=True)
    result = {
        "straight": straight,
        "resumed": dict(resumed.model.state_dict()),
        "predicted": torch.as_tensor(predicted.predictions),
    }
    rank = os.environ.get("RANK", "0")
    torch.save(result, out / f"weights_{rank}.pt")
    (out / f"log_{rank}.json").write_text(json.dumps([without_times(entry) for entry in log]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
