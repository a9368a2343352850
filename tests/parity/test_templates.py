"""The levels' templates, which learners copy, train the same weights, and resume after an interruption.

The network whose weights are compared has no batch norm, whose statistics are a rank's own. It computes in float64.
"""

import importlib.util
import itertools
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset

from common import ladder
from common.processes import ranks
from common.weights import max_weight_difference
from tests.levels import in_own_folder
from tests.states import forget_states

LEVELS = list(map(ladder.level_of, ladder.TEMPLATES))
EPOCHS = 3
STEPS_OF_EPOCH = 6
SMALL = ["--size", "32", "--batch-size", "8", "--workers", "0"]
ONE_EPOCH = [*SMALL, "--epochs", "1"]


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


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """50 images to train with, in 6 steps of 8 and a tail, and 17 to evaluate, which no number of processes divides."""
    folder = tmp_path_factory.mktemp("images")
    draw = np.random.default_rng(0)
    for split, counts in (("train", (26, 24)), ("val", (9, 8))):
        for name, brightness, count in (("dark", 0, counts[0]), ("light", 60, counts[1])):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(brightness, brightness + 180, (40, 48, 3)).astype("uint8")
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return folder


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


def crop_differently(template):
    load_data = template.load_data

    def load_and_change(args):
        train_set, val_set = load_data(args)
        train_set.seed += 1  # The crops alone depend on it.
        return train_set, val_set

    template.load_data = load_and_change


WITH_DROPOUT = partial(build_small_net, dropout=0.5)


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


def train(level, folder, world_size, *changes, flags=()):
    argv = [str(folder), *SMALL, "--epochs", str(EPOCHS), *flags]
    return ranks(world_size).run(run_template, level, argv, *changes)[0]


@pytest.fixture(scope="module")
def expected(images):
    return train("00_single_gpu", images, 1)


@pytest.mark.parametrize("level", ladder.DISTRIBUTED)
def test_two_processes_train_the_weights_of_one(level, images, expected):
    assert max_weight_difference(train(level, images, 2), expected) <= 1e-9


def test_the_weights_depend_on_the_crops(images, expected):
    other_crops = train("00_single_gpu", images, 1, crop_differently)
    assert max_weight_difference(other_crops, expected) > 1e-3


@pytest.fixture(scope="module")
def expected_of_pairs(images):
    return train("00_single_gpu", images, 1, train_pairs)


@pytest.mark.parametrize("level", ladder.DISTRIBUTED)
def test_another_task_needs_three_places_and_trains_the_weights_of_one_process(level, images, expected_of_pairs):
    assert max_weight_difference(train(level, images, 2, train_pairs), expected_of_pairs) <= 1e-9


@pytest.mark.parametrize("level", ladder.DISTRIBUTED)
def test_all_ranks_evaluate_with_the_statistics_of_rank_0(level, images):
    """They are what it saves. In training each rank's follow its own shard."""
    first, second = ranks(2).run(running_means, level, [str(images), *ONE_EPOCH])
    assert not torch.equal(first["training"], second["training"])
    assert torch.equal(first["evaluation"], first["training"])
    assert torch.equal(second["evaluation"], first["training"])


@pytest.mark.slow
@pytest.mark.parametrize("level, world_size", [("00_single_gpu", 1), *((level, 2) for level in ladder.DISTRIBUTED)])
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(level, world_size, images, tmp_path):
    saved = ["--checkpoint", str(tmp_path / "run")]
    whole = train(level, images, world_size, WITH_DROPOUT)
    assert train(level, images, world_size, WITH_DROPOUT, stop_in_last_epoch, flags=saved) is None
    resumed = train(level, images, world_size, WITH_DROPOUT, flags=saved)
    assert max_weight_difference(resumed, whole) == 0
    again = train(level, images, world_size, WITH_DROPOUT, flags=saved)
    assert max_weight_difference(again, whole) == 0, "a run that is complete trains nothing more"
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "no draft is left"
    if (tmp_path / "run").is_dir():
        assert len(list((tmp_path / "run").iterdir())) == 2, "a training does not fill the disk"


def accumulate_two_batches(template):
    class Accumulating(template.Accelerator):
        def backward(self, loss):
            with self.accumulate():
                super().backward(loss)

    template.Accelerator = partial(Accumulating, gradient_accumulation_steps=2)


def learning_rates(level, argv, *changes):
    rates = []
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    try:
        run_template(level, argv, *changes)
    finally:
        hook.remove()
    return rates


def test_the_schedule_of_level_03_waits_for_the_optimizer(images):
    argv = [str(images), *ONE_EPOCH]
    (rates,) = ranks(1).run(learning_rates, "03_accelerate", argv)
    (accumulating,) = ranks(1).run(learning_rates, "03_accelerate", argv, accumulate_two_batches)
    assert accumulating == rates[:3]


@pytest.mark.parametrize(
    "level", ["00_single_gpu", *(pytest.param(level, marks=pytest.mark.slow) for level in ladder.DISTRIBUTED)]
)
def test_with_more_epochs_and_another_rate_a_resumed_run_follows_its_own_schedule(level, images, tmp_path):
    argv = [str(images), *SMALL, "--epochs"]
    saved = ["--checkpoint", str(tmp_path / "run")]
    (of_one_epoch,) = ranks(1).run(learning_rates, level, [*argv, "1"])
    (of_two,) = ranks(1).run(learning_rates, level, [*argv, "2"])
    assert ranks(1).run(learning_rates, level, [*argv, "1", *saved, "--lr", "0.002"]) != [of_one_epoch]
    (resumed,) = ranks(1).run(learning_rates, level, [*argv, "2", *saved])
    assert resumed == of_two[len(of_one_epoch) :], "the first step too has not the rate that was saved"


@pytest.fixture(scope="module")
def other_classes(images, tmp_path_factory):
    """Images to evaluate of one class only. Each folder numbers its own, so the accuracy would be wrong."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "train").symlink_to(images / "train")
    (folder / "val").mkdir()
    (folder / "val" / "light").symlink_to(images / "val" / "light")
    return folder


@pytest.mark.parametrize("level", LEVELS)
def test_a_training_that_cannot_be_right_is_refused_by_all_ranks(level, images, other_classes):
    cases = [
        (other_classes, [], f"{other_classes}/train and {other_classes}/val must have the same classes"),
        (images, ["--batch-size", "64"], "50 training samples do not fill a batch of 64"),
    ]
    if level in ladder.DISTRIBUTED:
        cases.append((images, ["--batch-size", "9"], "--batch-size 9 cannot be divided among 2 processes"))
    for folder, flags, message in cases:
        refusals = ranks(2 if level in ladder.DISTRIBUTED else 1).run(refusal, level, [str(folder), *ONE_EPOCH, *flags])
        assert set(refusals) == {message}


@pytest.mark.parametrize("level", LEVELS)
def test_the_folder_of_a_checkpoint_is_made_or_refused_before_the_training(level, images, tmp_path):
    path = tmp_path / "new" / "folder" / "run.pt"
    assert ranks(1).run(refusal, level, [str(images), *ONE_EPOCH, "--checkpoint", str(path)]) == [None]
    assert path.exists()
    in_the_way = images / "train" / "dark" / "0.png" / "run.pt"
    (message,) = ranks(1).run(refusal, level, [str(images), *ONE_EPOCH, "--checkpoint", str(in_the_way)])
    assert "0.png" in message, "after an epoch torch.save would raise a RuntimeError"


@pytest.mark.slow
def test_rank_0_looks_for_the_checkpoint_of_level_02(images, expected, tmp_path):
    """If only another rank sees one, all begin anew. Some would else train other weights than the others."""
    argv = [str(images), *SMALL, "--checkpoint", "run", "--epochs"]
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    ranks(2).run(in_own_folder, folders, run_template, "02_ddp_raw", [*argv, "1"])
    assert [(folder / "run").exists() for folder in folders] == [True, False]
    weights, _ = ranks(2).run(in_own_folder, folders[::-1], run_template, "02_ddp_raw", [*argv, str(EPOCHS)])
    assert max_weight_difference(weights, expected) <= 1e-9


@pytest.mark.parametrize("level", LEVELS)
def test_a_template_stands_alone(level):
    """It imports nothing of this repository but, where that is the level's idea, the core or the Trainer."""
    lines = Path(ladder.ROOT / level / "template.py").read_text().splitlines()
    own = {line.split()[1] for line in lines if line.startswith(("from common", "import common", "from benchmarks"))}
    allowed = {"03_accelerate": {"common.accelerator", "common.accelerator.utils"}, "04_trainer": {"common.trainer"}}
    assert own == allowed.get(level, set())
