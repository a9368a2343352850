"""The small Trainer trains the bits of the whole one, on the example of level 04's page."""

import importlib
import os
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from common import ladder
from common.model import BasicNet
from common.processes import ranks
from common.small import trainer as small_trainer

WHOLE = "common.trainer"
SMALL = "common.small.trainer"
# What is logged about times, and what only the whole one logs.
ONLY_WHOLE = re.compile(r".*(runtime|per_second|flos)|grad_norm|train_loss")


def example(library: str, output_dir: str, settings: str = "", more: str = "", resume: str = "") -> dict:
    """Run the example with `library`'s Trainer; `settings` are added to its arguments, `more` to its Trainer's."""
    page = (ladder.ROOT / "04_trainer" / "README.md").read_text()
    [text] = re.findall(r"^## A Trainer in seven lines\n\n```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    if library == WHOLE and "eval_strategy" in settings:
        # The whole one asks for the model's output beside the loss, and has to be told what the labels are.
        text = text.replace("return F.nll_loss", "loss = F.nll_loss")
        text = text.replace("\n\n\nmodel =", "\n        return (loss, {}) if return_outputs else loss\n\n\nmodel =")
        settings += "label_names=['labels'], "
        # By default its DDP looks for unused parameters, and then puts the gradients into other buckets. Three ranks
        # are then added up in another order; two are not, because a + b is b + a.
        if int(os.environ["WORLD_SIZE"]) > 2:
            settings += "ddp_find_unused_parameters=False, "
    text = text.replace("remove_unused_columns", f"{settings}remove_unused_columns")
    text = text.replace("train_dataset=train_set", f"train_dataset=train_set{more}")
    text = text.replace("train()", f"train({resume})")
    module = importlib.import_module(library)
    torch.manual_seed(0)
    images = torch.randn(34, 1, 28, 28)
    samples = [(image, number % 10) for number, image in enumerate(images)]
    names = {
        "F": F,
        "BasicNet": BasicNet,
        "Trainer": module.Trainer,
        "TrainingArguments": module.TrainingArguments,
        "StopAtStep3": StopAtStep3,
        "output_dir": output_dir,
        "train_set": samples[:20],
        "eval_set": samples[20:],
        "to_dict": to_dict,
    }
    try:
        exec(text, names)
    finally:
        if "trainer" in names:
            names["trainer"].end()
    state = names["trainer"].state
    return {"weights": names["model"].state_dict(), "steps": state.global_step, "logs": state.log_history}


def to_dict(samples: list) -> dict:
    images = torch.stack([image for image, _ in samples])
    return {"images": images, "labels": torch.tensor([label for _, label in samples])}


class StopAtStep3(small_trainer.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 3


def assert_equal_weights(weights: dict, expected: dict) -> None:
    assert weights.keys() == expected.keys()
    for name in expected:
        assert torch.equal(weights[name], expected[name]), name


def both(world_size: int, folder: Path, *options: str) -> tuple[dict, dict]:
    """What the whole and the small one came to, on rank 0."""
    pool = ranks(world_size)
    [whole, *_] = pool.run(example, WHOLE, str(folder / "whole"), *options)
    [small, *_] = pool.run(example, SMALL, str(folder / "small"), *options)
    return whole, small


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
def test_the_example_trains_the_bits_of_the_whole_trainer(world_size, tmp_path):
    """Twenty samples: the last step of an epoch has fewer than eight for each rank."""
    settings = "logging_steps=2, eval_strategy='steps', eval_steps=4, "
    whole, small = both(world_size, tmp_path, settings, ", eval_dataset=eval_set")
    assert small["steps"] == whole["steps"] == 10
    assert_equal_weights(small["weights"], whole["weights"])
    expected = [{name: log[name] for name in log if not ONLY_WHOLE.fullmatch(name)} for log in whole["logs"]]
    expected = [log for log in expected if log.keys() != {"epoch", "step"}]  # the whole one's summary
    assert len(expected) == 5 + 3
    for ours, theirs in zip(small["logs"], expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_the_example_as_it_stands_trains_the_bits_of_the_whole_trainer(tmp_path):
    whole = example(WHOLE, str(tmp_path / "whole"))
    small = example(SMALL, str(tmp_path / "small"))
    assert small["steps"] == whole["steps"] == 10
    assert_equal_weights(small["weights"], whole["weights"])
    assert (tmp_path / "small" / "checkpoint-10.pt").exists()
    assert (tmp_path / "whole" / "checkpoint-10").exists()


@pytest.mark.parametrize("save_steps", [4, 6])
def test_a_resumed_training_ends_with_the_same_bits(save_steps, tmp_path):
    """Three steps make an epoch: step 4 is within the second one, step 6 at its end."""
    settings = f"save_steps={save_steps}, logging_steps=5, "
    whole = example(SMALL, str(tmp_path), settings)
    resumed = example(SMALL, str(tmp_path), settings, resume=f"'{tmp_path}/checkpoint-{save_steps}.pt'")
    assert_equal_weights(resumed["weights"], whole["weights"])
    assert resumed["logs"] == whole["logs"]
    again = example(SMALL, str(tmp_path), settings, resume=f"'{tmp_path}/checkpoint-10.pt'")
    assert again["steps"] == 10
    assert_equal_weights(again["weights"], whole["weights"])


def test_a_callback_stops_the_training(tmp_path):
    stopped = example(SMALL, str(tmp_path), more=", callbacks=[StopAtStep3()]")
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
def test_what_only_the_whole_trainer_does_is_refused(settings, message):
    with pytest.raises(NotImplementedError, match=message):
        small_trainer.Trainer(None, small_trainer.TrainingArguments("", **settings), None, [])
