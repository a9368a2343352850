"""Fast halves: the allocator slows the whole batch, and halves seem to gain.

On a CPU the C library maps a block of more than 32 MiB from the system anew
each time, and the kernel fills its pages with zeros, one fault each. Half of
the batch has blocks that stay below, which are kept and used again. So two
processes with half a batch each can be faster than one with the whole, and so
could one process with two micro-batches be. Count the faults of a step: where
the whole has thousands and its halves nearly none, compare again with an
allocator that keeps large blocks (`common/allocator.py`).
"""

import statistics

import torch

from common.allocator import (
    M_MMAP_THRESHOLD,
    M_TRIM_THRESHOLD,
    OLD_MMAP_THRESHOLD,
    keep_large_blocks,
    minor_faults,
    set_parameter,
    why_not,
)

LEVELS = ("00_single_gpu", "02_ddp_raw")
WORLD_SIZE = 1
SYMPTOM = "silent"
# 40 MB in float32, and halves of 20.
NUMBERS = 10_000_000
STEPS = 25
# A page is 4 KiB; the blocks of a step are many.
FEW_FAULTS = 1000


def faults_per_step(numbers):
    """Of a step that needs one large block for its result, the median.

    The first steps are others: a heap that grows is filled with zeros too.
    """
    inputs = torch.ones(numbers)
    faults = []
    for _ in range(STEPS):
        before = minor_faults() or 0
        torch.relu(inputs)
        after = minor_faults() or 0
        faults.append(after - before)
    return statistics.median(faults)


def allocator_of_glibc():
    """The allocator that glibc's rule grows to: it keeps blocks to 32 MiB."""
    if why_not() is None:
        set_parameter(M_MMAP_THRESHOLD, OLD_MMAP_THRESHOLD)
        set_parameter(M_TRIM_THRESHOLD, 2 * OLD_MMAP_THRESHOLD)


def wrong():
    allocator_of_glibc()
    whole = faults_per_step(NUMBERS)
    half = faults_per_step(NUMBERS // 2)
    keep_large_blocks()  # the process goes on to do other things
    return whole, half


def right():
    keep_large_blocks()
    whole = faults_per_step(NUMBERS)
    half = faults_per_step(NUMBERS // 2)
    return whole, half


def detect(outcome):
    """Give it the faults of a step with the whole batch and with half."""
    whole, half = outcome
    if whole > FEW_FAULTS and whole > 4 * half:
        return f"{whole:.0f} page faults for the whole, {half:.0f} for its half"


def measure(outcome):
    return f"{outcome[0]:.0f} and {outcome[1]:.0f} faults"
