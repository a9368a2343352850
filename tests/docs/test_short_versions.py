"""The ten-line Trainer of the pages trains."""

import re

import pytest
import torch
import torch.nn.functional as F

from common import ladder
from common.model import BasicNet
from common.trainer import Trainer, TrainingArguments

LONGEST = 10


def section(level: str, title: str, page: str = "README.md") -> str:
    """What a page of a level says under a heading."""
    text = (ladder.ROOT / level / page).read_text()
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_in_ten_lines_trains(tmp_path):
    (text,) = blocks(section("04_trainer", "A Trainer in ten lines"), "python")
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
