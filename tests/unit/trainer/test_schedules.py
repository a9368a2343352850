"""Learning rates: step by step those of transformers, or the same refusal."""

from types import SimpleNamespace

import pytest
import torch

from common.trainer.optimization import SCHEDULES, make_scheduler

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
