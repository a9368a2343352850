"""The small Trainer trains the bits of the whole one, on the example of level 04's page."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from common import ladder
from common.model import BasicNet
from common.processes import ranks
from common.small import trainer as small_trainer
from tests.bits import TIMINGS, differences

WHOLE = "common.trainer"
SMALL = "common.small.trainer"
ONLY_WHOLE = (*TIMINGS, "flos", "grad_norm", "train_loss")  # Endings of names that only the whole one logs.


# The body of this function, but for its last line, is printed in 04_trainer/README.md.
def example(Trainer, TrainingArguments, output_dir, train_set):
    class DigitTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return F.nll_loss(model(inputs["images"]), inputs["labels"])

    model = BasicNet()
    args = TrainingArguments(output_dir, max_steps=10, per_device_train_batch_size=8, remove_unused_columns=False)
    trainer = DigitTrainer(model, args, data_collator=to_dict, train_dataset=train_set)
    trainer.train()
    return trainer


def test_the_page_shows_the_example():
    page = (ladder.ROOT / "04_trainer" / "README.md").read_text()
    _, _, rest = page.partition("\n## A Trainer in seven lines\n\n```python\n")
    shown, _, _ = rest.partition("```")
    _, *body, _ = inspect.getsource(example).splitlines()
    written = [line.removeprefix("    ") for line in body if line]
    assert written == [line for line in shown.splitlines() if line]


def train(name: str, output_dir: Path, resume: str | None = None, callbacks: tuple = (), **settings: Any) -> dict:
    """The outcome of a training like the example by the Trainer of the library `name`, with other settings."""
    library = importlib.import_module(name)

    class DigitTrainer(library.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = F.nll_loss(model(inputs["images"]), inputs["labels"])
            return (loss, {}) if return_outputs else loss

    torch.manual_seed(0)
    all_samples = samples(34)
    args = library.TrainingArguments(str(output_dir), max_steps=10, remove_unused_columns=False, **settings)
    data = {"data_collator": to_dict, "train_dataset": all_samples[:20], "eval_dataset": all_samples[20:]}
    trainer = DigitTrainer(BasicNet(), args, **data, callbacks=[*callbacks])
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer)


def outcome(trainer) -> dict:
    trainer.end()
    state = trainer.state
    return {"weights": trainer.model.state_dict(), "steps": state.global_step, "logs": state.log_history}


def samples(number: int) -> list:
    return [(image, number % 10) for number, image in enumerate(torch.randn(number, 1, 28, 28))]


def to_dict(samples: list) -> dict:
    images = torch.stack([image for image, _ in samples])
    return {"images": images, "labels": torch.tensor([label for _, label in samples])}


class StopAtStep3(small_trainer.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 3


EVALUATING = {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 4}
# The whole Trainer has to be told what the labels are. By default its DDP looks for unused parameters, and then puts
# the gradients into other buckets: three ranks are added up in another order.
EVALUATING_WHOLE = EVALUATING | {"label_names": ["labels"], "ddp_find_unused_parameters": False}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "world_size, norm",  # A norm of 0, once, does not clip.
    [(2, 1.0), *(pytest.param(n, norm, marks=pytest.mark.slow) for n, norm in ((1, 0.0), (1, 1.0), (3, 1.0)))],
)
def test_the_small_trainer_trains_and_evaluates_with_the_bits_of_the_whole_one(world_size, norm, tmp_path):
    """Twenty samples: the last step of an epoch has fewer than eight for each rank."""
    pool = ranks(world_size)
    whole, *_ = pool.run(train, WHOLE, tmp_path / "whole", max_grad_norm=norm, **EVALUATING_WHOLE)
    small, *_ = pool.run(train, SMALL, tmp_path / "small", max_grad_norm=norm, **EVALUATING)
    assert small["steps"] == whole["steps"] == 10
    assert list(differences(small["weights"], whole["weights"])) == []
    expected = [{name: log[name] for name in log if not name.endswith(ONLY_WHOLE)} for log in whole["logs"]]
    expected = [log for log in expected if log.keys() != {"epoch", "step"}]  # This is the whole one's summary.
    # Of ten steps, every second one is logged; evaluations follow steps 4, 8 and the last one.
    assert len(expected) == 5 + 3
    for ours, theirs in zip(small["logs"], expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_the_example_trains_the_bits_of_the_whole_trainer(tmp_path):
    outcomes = {}
    for name in (WHOLE, SMALL):
        library = importlib.import_module(name)
        torch.manual_seed(0)
        trainer = example(library.Trainer, library.TrainingArguments, str(tmp_path / name), samples(20))
        outcomes[name] = outcome(trainer)
    assert outcomes[SMALL]["steps"] == outcomes[WHOLE]["steps"] == 10
    assert list(differences(outcomes[SMALL]["weights"], outcomes[WHOLE]["weights"])) == []
    assert (tmp_path / SMALL / "checkpoint-10.pt").exists()
    assert (tmp_path / WHOLE / "checkpoint-10").exists()


@pytest.mark.parametrize("save_steps", [4, 6])
def test_a_resumed_training_ends_with_the_same_bits(save_steps, tmp_path):
    """Three steps make an epoch: step 4 is within the second one, step 6 at its end."""
    settings = {"save_steps": save_steps, "logging_steps": 5}
    whole = train(SMALL, tmp_path, **settings)
    resumed = train(SMALL, tmp_path, resume=f"{tmp_path}/checkpoint-{save_steps}.pt", **settings)
    assert list(differences(resumed, whole)) == []
    again = train(SMALL, tmp_path, resume=f"{tmp_path}/checkpoint-10.pt", **settings)
    assert again["steps"] == 10
    assert list(differences(again["weights"], whole["weights"])) == []


def test_a_callback_stops_the_training(tmp_path):
    stopped = train(SMALL, tmp_path, callbacks=(StopAtStep3(),))
    assert stopped["steps"] == 3
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"max_steps": 1, "remove_unused_columns": True}, "only the whole Trainer removes columns"),
        ({"max_steps": -1, "remove_unused_columns": False}, "only the whole Trainer counts in epochs"),
        (
            {"max_steps": 1, "eval_strategy": "epoch", "remove_unused_columns": False},
            "only the whole Trainer counts in epochs",
        ),
    ],
)
def test_the_small_trainer_refuses_what_only_the_whole_one_does(settings, message):
    with pytest.raises(NotImplementedError, match=message):
        small_trainer.Trainer(None, small_trainer.TrainingArguments("", **settings), None, [])
