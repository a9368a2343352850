"""The answers of the exercises: each number in bold is computed here, by the code that it is about or by hand."""

import math
import re

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


def as_dtype(value: float, dtype: torch.dtype) -> str:
    return f"{torch.tensor(value, dtype=dtype).item():.3g}"


def bold_in_answers(level: str) -> list[list[str]]:
    text = section(level, "Exercises")
    answers = ANSWER.findall(text)
    assert text.count("**Predict:**") == len(answers)
    return [BOLD.findall(answer) for answer in answers]


def test_answers_of_level_00():
    steps_and_images_left_out, memory, first_images = bold_in_answers("00_single_gpu")
    assert steps_and_images_left_out == [str(IMAGES // 96), str(IMAGES % 96), str(IMAGES // 64), str(IMAGES % 64)]
    assert memory == [f"{STATES * WEIGHTS * FLOAT32_BYTES / 2**20:.1f} MiB"]
    assert first_images == [str(first_image(epoch)) for epoch in (0, 1)]


def test_answers_of_level_01():
    shards, busy_replicas, copied = bold_in_answers("01_data_parallel")
    assert shards == [shard_sizes(64, 3), shard_sizes(64, 7)]
    assert busy_replicas == [str(len(torch.empty(2).chunk(4)))]
    assert copied == [f"{3 * WEIGHTS * FLOAT32_BYTES / 1e6:.1f} MB"]


def test_answers_of_level_02():
    step, positions, sent = bold_in_answers("02_ddp_raw")
    samples = (ladder.ROOT / "02_ddp_raw" / "one_step.py").read_text()
    y = torch.tensor([float(value) for value in re.findall(r"\[1\.0, (-?\d\.\d)\]", samples)])
    gradient = (2 - y).mean().item()
    assert step == [f"{gradient:g}", f"{2 - 0.1 * gradient:g}"]
    sampler = DistributedSampler(range(IMAGES), num_replicas=4, rank=1, shuffle=False)
    of_rank_1 = [str(position) for position in list(sampler)[:16]]
    assert positions == [", ".join(of_rank_1[:3]), of_rank_1[-1], str(len(of_rank_1))]
    ranks = 4
    sent_in_a_step = 2 * (ranks - 1) / ranks * WEIGHTS * FLOAT32_BYTES  # A rank of a ring sends this.
    assert sent == [f"{IMAGES // 64 * sent_in_a_step / 1e9:.1f} GB"]


def test_answers_of_level_03():
    accumulation, evaluated, rounded = bold_in_answers("03_accelerate")
    samples_of_a_forward = 64 // 4 // 2
    steps = IMAGES // 64
    assert accumulation == [str(samples_of_a_forward), str(steps * 4), str(steps)]
    batches = BatchSampler(SequentialSampler(range(10_000)), 66, drop_last=False)
    shards = [BatchSamplerShard(batches, 3, rank, split_batches=True) for rank in range(3)]
    computed = sum(len(batch) for shard in shards for batch in shard)
    assert evaluated == [str(computed), str(computed - 10_000)]
    in_fp16 = as_dtype(1e-8, torch.float16)
    scaled_in_fp16 = as_dtype(1e-8 * 65536, torch.float16)
    assert rounded == [in_fp16, as_dtype(1e-8, torch.bfloat16), scaled_in_fp16]


def test_answers_of_level_04():
    global_batch, steps, learning_rate = bold_in_answers("04_trainer")
    batch = 16 * 2 * 2  # per device, ranks, accumulation
    assert global_batch == [str(batch)]
    assert steps == [str(math.ceil(IMAGES / batch)), str(IMAGES // batch)]  # with the epoch's tail, and without it
    assert TrainingArguments("out").lr_scheduler_type == "linear"
    assert learning_rate == [f"{1e-3 / 2:g}"]  # in the middle of the training
