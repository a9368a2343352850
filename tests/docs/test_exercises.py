"""The answers of the exercises: every number in bold is computed here, by the code it is about or from its numbers."""

import math
import re

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from common import ladder
from common.accelerator.sampler import BatchSamplerShard
from common.model import BasicNet
from common.trainer import TrainingArguments
from tests.docs.pages import section

ANSWER = re.compile(r"<details>(.*?)</details>", re.DOTALL)
BOLD = re.compile(r"\*\*(.*?)\*\*")
IMAGES = 60_000
WEIGHTS = sum(parameter.numel() for parameter in BasicNet().parameters())
FLOAT32_BYTES = 4
STATES = 4  # The weights, their gradients, and two moments of AdamW.


def first_image(epoch: int) -> int:
    return torch.randperm(IMAGES, generator=torch.Generator().manual_seed(42 + epoch))[0].item()


def shard_sizes(batch: int, replicas: int) -> str:
    return ", ".join(str(len(shard)) for shard in torch.empty(batch).chunk(replicas))


def mean_gradient_of_one_step() -> float:
    source = (ladder.ROOT / "02_ddp_raw" / "one_step.py").read_text()
    targets = [float(value) for value in re.findall(r"\[1\.0, (-?\d\.\d)\]", source)]
    return 2 - sum(targets) / len(targets)


def evaluated_on_three_ranks() -> int:
    batches = BatchSampler(SequentialSampler(range(10_000)), 66, drop_last=False)
    shards = [BatchSamplerShard(batches, 3, rank, split_batches=True) for rank in range(3)]
    return sum(len(batch) for shard in shards for batch in shard)


def as_dtype(value: float, dtype: torch.dtype) -> str:
    return f"{torch.tensor(value, dtype=dtype).item():.3g}"


GRADIENT = mean_gradient_of_one_step()
RANK_1 = list(DistributedSampler(range(IMAGES), 4, 1, shuffle=False))[:16]
SENT_IN_A_STEP = 2 * (4 - 1) / 4 * WEIGHTS * FLOAT32_BYTES  # A rank of a ring of four sends this.
COMPUTED = evaluated_on_three_ranks()
BATCH = 16 * 2 * 2  # The batch of a device, ranks and accumulation.
# The numbers in bold in each level's answers, by what its question asks for.
ANSWERS = {
    "00_single_gpu": {
        "steps and images left out, with batches of 96 and of 64": [
            *map(str, divmod(IMAGES, 96)),
            *map(str, divmod(IMAGES, 64)),
        ],
        "memory of the training state": [f"{STATES * WEIGHTS * FLOAT32_BYTES / 2**20:.1f} MiB"],
        "first images of epochs 0 and 1": [str(first_image(0)), str(first_image(1))],
    },
    "01_data_parallel": {
        "shards of a batch for 3 and for 7 replicas": [shard_sizes(64, 3), shard_sizes(64, 7)],
        "replicas that get a part of 2 images": [str(len(torch.empty(2).chunk(4)))],
        "weights that a step copies": [f"{3 * WEIGHTS * FLOAT32_BYTES / 1e6:.1f} MB"],
    },
    "02_ddp_raw": {
        "mean gradient and new weight": [f"{GRADIENT:g}", f"{2 - 0.1 * GRADIENT:g}"],
        "positions of rank 1": [", ".join(map(str, RANK_1[:3])), str(RANK_1[-1]), str(len(RANK_1))],
        "sent in an epoch": [f"{IMAGES // 64 * SENT_IN_A_STEP / 1e9:.1f} GB"],
    },
    "03_accelerate": {
        "samples of a forward, forwards and synchronized backwards": [
            str(64 // 4 // 2),
            str(IMAGES // 64 * 4),
            str(IMAGES // 64),
        ],
        "samples that are evaluated, and padding": [str(COMPUTED), str(COMPUTED - 10_000)],
        "1e-8 in fp16, in bf16 and, scaled, in fp16": [
            as_dtype(1e-8, torch.float16),
            as_dtype(1e-8, torch.bfloat16),
            as_dtype(1e-8 * 65536, torch.float16),
        ],
    },
    "04_trainer": {
        "global batch": [str(BATCH)],
        "steps of an epoch, with the tail and without it": [str(math.ceil(IMAGES / BATCH)), str(IMAGES // BATCH)],
        "learning rate in the middle, which the default schedule, linear, has halved": [f"{1e-3 / 2:g}"],
    },
}


@pytest.mark.parametrize("level", ladder.LEVELS)
def test_the_numbers_in_the_answers_are_right(level):
    assert TrainingArguments("out").lr_scheduler_type == "linear"
    text = section(level, "Exercises")
    answers = ANSWER.findall(text)
    assert text.count("**Predict:**") == len(answers) >= 3
    for (question, numbers), answer in zip(ANSWERS[level].items(), answers, strict=True):
        assert BOLD.findall(answer) == numbers, question
