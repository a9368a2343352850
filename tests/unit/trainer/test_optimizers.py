"""Optimizers and schedules of a script end the same as with transformers."""

import pytest
import torch

from tests.toys import Points, seeded_net
from tests.unit.trainer.both import end, make, same_on_both, train

pytestmark = pytest.mark.usefixtures("transformers")


def test_the_scheduler_of_the_script_is_given_to_callbacks_and_kept_in_a_second_training(tmp_path):
    def script(library, folder):
        positions = []

        class Watch(library.TrainerCallback):
            def on_step_end(self, args, state, control, lr_scheduler=None, **kwargs):
                positions.append((lr_scheduler.last_epoch, lr_scheduler.base_lrs, lr_scheduler is schedule))

        model = seeded_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        extra = {"optimizers": (optimizer, schedule), "callbacks": [Watch]}
        trainer = make(library, folder, model=model, extra=extra, max_steps=3)
        for _ in range(2):
            trainer.train()
        return positions, end(trainer)

    positions, _ = same_on_both(script, tmp_path)
    assert positions == [(step, [0.05], True) for step in (1, 2, 3, 4, 5, 6)]


class ScheduleFree(torch.optim.SGD):
    """Notes whenever it is told of a mode, in which an optimizer of this kind has other weights."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, lr=0.1)
        self.calls = []

    def train(self) -> None:
        self.calls.append("train")

    def eval(self) -> None:
        self.calls.append("eval")


def test_an_optimizer_with_modes_is_told_of_them(tmp_path):
    def script(library, folder):
        model = seeded_net()
        optimizer = ScheduleFree(model.parameters())
        extra = {"optimizers": (optimizer, None)}
        trainer = make(library, folder, model=model, extra=extra, eval_strategy="epoch")
        trainer.evaluate()
        trainer.train()
        trainer.predict(Points(5))
        return optimizer.calls

    ours = same_on_both(script, tmp_path)
    assert ours[:2] == ["eval", "train"] and ours[-1] == "eval"


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd", "rmsprop"])
def test_an_override_gives_the_optimizer_groups_of_its_own(optim, tmp_path):
    def script(library, folder):
        class TwoRates(library.Trainer):
            def create_optimizer(self):
                optimizer_class, arguments = library.Trainer.get_optimizer_cls_and_kwargs(self.args, self.model)
                first, *others = self.model.parameters()
                self.optimizer = optimizer_class([{"params": [first], "lr": 0.5}, {"params": others}], **arguments)
                return self.optimizer

        return train(library, folder, trainer_class=TwoRates, optim=optim, max_steps=3, learning_rate=0.01)

    same_on_both(script, tmp_path)
