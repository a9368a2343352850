"""Learning rates are step by step those of transformers, or the same refusal; and so are a script's optimizers."""

from types import SimpleNamespace

import pytest
import torch

from common.trainer.optimization import SCHEDULES, make_scheduler
from tests.toys import Points, seeded_net
from tests.unit.trainer.both import end, make, same_on_both, train

DECAY = [{}, {"num_stable_steps": 2, "num_cycles": 1.3}, {"decay_type": "steep"}]
OPTIONS = {
    "cosine": [{"num_cycles": 1.5}],
    "cosine_with_restarts": [{"num_cycles": 3}],
    "cosine_with_min_lr": [
        {"min_lr": 1e-3},
        {"min_lr_rate": 0.1, "num_cycles": 2},
        {"min_lr": 1.0, "min_lr_rate": 1.0},
    ],
    "polynomial": [{"power": 2.0, "lr_end": 1e-3}, {"lr_end": 1.0}],
    "inverse_sqrt": [{"timescale": 7}],
    "warmup_stable_decay": [
        *({"num_decay_steps": 3} | decay for decay in DECAY),
        {"num_decay_steps": 3, "warmup_type": "cosine", "decay_type": "linear", "min_lr_ratio": 0.2},
        {"num_decay_steps": 3, "warmup_type": "1-sqrt", "decay_type": "1-sqrt"},
    ],
}


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "reduce_lr_on_plateau"])
@pytest.mark.parametrize(("warmup", "total"), [(0, 9), (3, 10), (1, 1), (12, 8)])
def test_learning_rates_are_those_of_transformers(name, warmup, total, transformers):
    def rates(make):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.05)
        try:
            scheduler = make(optimizer)
            seen = []
            for _ in range(total + 3):
                seen.append(scheduler.get_last_lr()[0])
                optimizer.step()
                scheduler.step()
        except Exception as error:
            return type(error)
        return seen

    for options in [{}, {"nonsense": 1}, *OPTIONS.get(name, [])]:
        args = SimpleNamespace(
            lr_scheduler_type=name, lr_scheduler_kwargs=options, get_warmup_steps=lambda steps: warmup
        )
        ours = rates(lambda optimizer, args=args: make_scheduler(optimizer, args, total))
        theirs = rates(
            lambda optimizer, options=options: transformers.get_scheduler(name, optimizer, warmup, total, options)
        )
        if theirs is ZeroDivisionError:  # Ours is below.
            assert name == "polynomial" and warmup == total
        else:
            assert ours == theirs


def test_a_polynomial_may_have_a_training_that_is_all_warm_up():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.05)
    args = SimpleNamespace(lr_scheduler_type="polynomial", lr_scheduler_kwargs=None, get_warmup_steps=lambda steps: 1)
    scheduler = make_scheduler(optimizer, args, 1)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.05]


def test_the_scheduler_of_the_script_is_given_to_callbacks_and_kept_in_a_second_training(tmp_path, transformers):
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


def test_an_optimizer_with_modes_is_told_of_them(tmp_path, transformers):
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
def test_an_override_gives_the_optimizer_groups_of_its_own(optim, tmp_path, transformers):
    def script(library, folder):
        class TwoRates(library.Trainer):
            def create_optimizer(self):
                optimizer_class, arguments = library.Trainer.get_optimizer_cls_and_kwargs(self.args, self.model)
                first, *others = self.model.parameters()
                self.optimizer = optimizer_class([{"params": [first], "lr": 0.5}, {"params": others}], **arguments)
                return self.optimizer

        return train(library, folder, trainer_class=TwoRates, optim=optim, max_steps=3, learning_rate=0.01)

    same_on_both(script, tmp_path)
