"""Trainers, models and settings that are made early, kept long and used in another order than they were made."""

import pytest
import torch
from torch.utils.data import DataLoader

from common.trainer import Trainer
from tests.toys import Points
from tests.unit.trainer.toy import make_trainer


@pytest.mark.parametrize("evaluates_first", [True, False])
def test_a_model_that_another_trainer_trained_in_bf16_computes_as_this_one_was_asked(evaluates_first, tmp_path):
    """In the original the model goes on in bf16."""
    earlier = make_trainer(tmp_path, bf16=True)
    earlier.train()
    trainer = make_trainer(tmp_path, model=earlier.model, evaluate=8)
    dtypes = []
    trainer.model.linear.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    if evaluates_first:
        trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    assert set(dtypes) == {torch.float32}


def test_a_model_that_is_evaluated_again_and_again_before_training_is_saved_once(tmp_path):
    trainer = make_trainer(tmp_path, evaluate=8)
    trainer.evaluate()
    trainer.evaluate()
    trainer.accelerator.save_state(tmp_path / "checkpoint")
    assert [path.name for path in (tmp_path / "checkpoint").glob("model*")] == ["model.safetensors"]


def test_a_batch_size_that_is_changed_between_two_trainings_is_obeyed(tmp_path):
    """In the original the second training has the batches of the first."""
    trainer = make_trainer(tmp_path, train=24)
    assert trainer.train().global_step == 3
    trainer.args.per_device_train_batch_size = 4
    assert trainer.train().global_step == 6
    assert trainer.state.train_batch_size == 4


def test_evaluation_loaders_that_an_override_prepares_do_not_pile_up_in_checkpoints(tmp_path):
    class Prepares(Trainer):
        def get_eval_dataloader(self, eval_dataset=None):
            return self.accelerator.prepare(DataLoader(Points(8), 4))

    saving = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    make_trainer(tmp_path, trainer_class=Prepares, evaluate=8, **saving).train()
    first, last = ({path.name for path in (tmp_path / f"checkpoint-{step}").iterdir()} for step in (1, 5))
    assert first == last
