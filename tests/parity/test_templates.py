"""The levels' templates, which learners copy, train the same weights, and resume after an interruption."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from common import ladder
from common.processes import ranks
from common.weights import max_weight_difference
from tests.levels import in_own_folder
from tests.parity.templates import (
    EPOCHS,
    accumulate_two_batches,
    build_small_net,
    learning_rates,
    refusal,
    run_template,
    running_means,
    stop_in_last_epoch,
    train_pairs,
)

LEVELS = list(map(ladder.level_of, ladder.TEMPLATES))
SMALL = ["--size", "32", "--batch-size", "8", "--workers", "0"]
ONE_EPOCH = [*SMALL, "--epochs", "1"]
WITH_DROPOUT = partial(build_small_net, dropout=0.5)


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


def train(level, folder, world_size, *changes, flags=()):
    argv = [str(folder), *SMALL, "--epochs", str(EPOCHS), *flags]
    return ranks(world_size).run(run_template, level, argv, *changes)[0]


@pytest.fixture(scope="module")
def expected(images):
    return train("00_single_gpu", images, 1)


@pytest.mark.parametrize("level", ladder.DISTRIBUTED)
def test_two_processes_train_the_weights_of_one(level, images, expected):
    assert max_weight_difference(train(level, images, 2), expected) <= 1e-9


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
