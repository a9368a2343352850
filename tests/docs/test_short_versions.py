"""The change in ten lines: each line is one of the scripts', and the ten-line Trainer trains."""

import re

import pytest
import torch
import torch.nn.functional as F

from common import ladder
from common.model import BasicNet
from common.trainer import Trainer, TrainingArguments

LONGEST = 10
# The page of each short diff, and the scripts before and after it.
SHORT_DIFFS = {
    "01_data_parallel/README.md": ("00_single_gpu", "01_data_parallel"),
    "02_ddp_raw/README.md": ("01_data_parallel", "02_ddp_raw"),
    "03_accelerate/README.md": ("02_ddp_raw", "03_accelerate"),
    "03_accelerate/LONG_TRAINING.md": ("03_accelerate", ladder.FULL),
}


def section(level: str, title: str, page: str = "README.md") -> str:
    """What a page of a level says under a heading."""
    text = (ladder.ROOT / level / page).read_text()
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def code_lines(rung: str) -> set[str]:
    """The script's lines without indentation and comments."""
    return {line.split("  #")[0].strip() for line in ladder.source(rung)}


def test_the_short_diffs_show_lines_that_change():
    for path, (before, after) in SHORT_DIFFS.items():
        level, page = path.split("/")
        [diff] = blocks(section(level, "The change in ten lines", page), "diff")
        ours, theirs = code_lines(before), code_lines(after)
        lines = diff.splitlines()
        assert len(lines) <= LONGEST
        for line in lines:
            sign, code = line[0], line[2:]
            expected = {"-": (True, False), "+": (False, True), " ": (True, True)}[sign]
            assert (code in ours, code in theirs) == expected, line


def test_the_short_training_is_that_of_level_00():
    (training,) = blocks(section("00_single_gpu", "The training in ten lines"), "python")
    script = [line.split("  #")[0].strip() for line in ladder.source("00_single_gpu")]
    shown = [line.strip() for line in training.splitlines()]
    positions = [script.index(line) for line in shown]
    assert positions == sorted(positions) and len(shown) == 10


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_in_ten_lines_trains(tmp_path):
    (text,) = blocks(section("04_trainer", "A Trainer in ten lines"), "python")
    assert blocks((ladder.ROOT / "README.md").read_text(), "python") == [text]
    assert len([line for line in text.splitlines() if line]) <= LONGEST
    images = torch.randn(16, 1, 28, 28)
    names = {
        "F": F,
        "BasicNet": BasicNet,
        "Trainer": Trainer,
        "TrainingArguments": TrainingArguments,
        "output_dir": str(tmp_path),
        "train_set": [(image, number % 10) for number, image in enumerate(images)],
        "to_dict": lambda batch: {
            "images": torch.stack([image for image, _ in batch]),
            "labels": torch.tensor([label for _, label in batch]),
        },
    }
    exec(text, names)
    assert names["trainer"].state.global_step == 10
