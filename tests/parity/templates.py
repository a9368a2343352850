"""A level's template, run on this rank with another network, another task, or an interruption.

The network whose weights are compared has no batch norm, whose statistics are a rank's own. It computes in float64.
"""

import importlib.util
import itertools
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset

from common import ladder
from tests.states import forget_states

EPOCHS = 3
STEPS_OF_EPOCH = 6


class Interrupted(Exception):
    """The end of a run in the middle of its epochs."""


class SmallNet(nn.Module):
    def __init__(self, classes: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 5, stride=2),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.AdaptiveAvgPool2d(3),
            nn.Flatten(),
            nn.Linear(72, classes),
        ).double()

    def forward(self, images):
        return self.layers(images.double())


class Pairs(Dataset):
    """Samples with two inputs, of which one is padded tokens, and a target that is no class."""

    def __init__(self, size, seed):
        draw = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(1, 20, (size, 7), generator=draw)
        self.tokens[::3, 4:] = 0
        self.numbers = torch.randn(size, 3, generator=draw, dtype=torch.float64)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return (self.tokens[index], self.numbers[index]), self.numbers[index].sum() + self.tokens[index].sum() / 70


class PairsNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 5, padding_idx=0).double()
        self.out = nn.Linear(8, 1).double()

    def forward(self, tokens, numbers):
        return self.out(torch.cat([self.embed(tokens).mean(dim=1), numbers], dim=1)).squeeze(1)


# Changes to a template, each of which is a function of its module.


def build_small_net(template, dropout):
    template.build_network = lambda args, train_set: SmallNet(2, dropout)


def train_pairs(template):
    """Put another task into the three places of a template that are for it."""
    template.load_data = lambda args: (Pairs(50, seed=1), Pairs(17, seed=2))
    template.build_network = lambda args, train_set: PairsNet()
    template.compute_loss = nn.functional.mse_loss
    template.score = lambda outputs, targets: (outputs - targets).abs()


def stop_in_last_epoch(template):
    steps = itertools.count(1)

    def stop(*_):
        if next(steps) > (EPOCHS - 1) * STEPS_OF_EPOCH:
            hook.remove()
            raise Interrupted

    hook = register_optimizer_step_post_hook(stop)


def accumulate_two_batches(template):
    class Accumulating(template.Accelerator):
        def backward(self, loss):
            with self.accumulate():
                super().backward(loss)

    template.Accelerator = partial(Accumulating, gradient_accumulation_steps=2)


def run_template(level, argv, *changes):
    """Train with a level's template on this rank. Returns the weights; None if it was interrupted.

    It trains a SmallNet without dropout, unless one of the `changes` says otherwise.
    """
    spec = importlib.util.spec_from_file_location("template", ladder.ROOT / level / "template.py")
    template = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(template)
    build_small_net(template, dropout=0.0)
    for change in changes:
        change(template)
    try:
        model = template.train(template.parse_args(argv))
        assert not dist.is_initialized(), "a template leaves its group"
        return model.state_dict()
    except Interrupted:
        return None
    finally:
        forget_states()


def refusal(level, argv):
    """The message with which a template ends on this rank; None if it trains."""
    try:
        run_template(level, argv)
    except (OSError, SystemExit) as error:
        return str(error)


def running_means(level, argv):
    """A batch norm's on this rank: after the last forward in training, and in the evaluation that follows."""
    norm = nn.BatchNorm2d(3)
    seen = {}

    def look(module, *_):
        seen["training" if module.training else "evaluation"] = module.running_mean.clone()

    def build_network(template):
        layers = [norm, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)]
        template.build_network = lambda args, train_set: nn.Sequential(*layers)

    norm.register_forward_hook(look)
    run_template(level, argv, build_network)
    return seen


def learning_rates(level, argv, *changes):
    rates = []
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    try:
        run_template(level, argv, *changes)
    finally:
        hook.remove()
    return rates
