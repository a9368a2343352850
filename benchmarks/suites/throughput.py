"""Steady-state throughput of the levels: their own train.py, called again and again in processes that stay.

A configuration is a level, a number of processes and a global batch. Its processes are started once and import the
level once. A sample is the images per second of the slowest rank in one call of the unmodified `train(args)`. The steps
of a warm-up are not counted.

Without GPUs a device is an equal part of the cores: see `common.cores`. Level 00 has one device, as it would have one
GPU; several processes or replicas have one each. One process with all cores is a row apart, because only a CPU offers
this choice.
"""

import statistics
from dataclasses import asdict, replace
from functools import partial

import torch

from benchmarks.harness import records
from benchmarks.harness.configurations import Configuration, Steps
from benchmarks.harness.options import BATCH_SIZES, WARM_UP_STEPS, MeasureOptions
from benchmarks.harness.paired import take_turns
from benchmarks.harness.records import Pair
from benchmarks.harness.rows import BASELINE, RAW_DDP
from common import ladder
from common.cores import available_cores
from common.data.synthetic import SIZES

# More rounds make an interval narrow, longer samples do not.
SECONDS_OF_A_SAMPLE = 0.5
FEW_STEPS = Steps(WARM_UP_STEPS, 2)


def measure(options: MeasureOptions) -> dict:
    """Strong and weak scaling, each at two batches; with --quick at one."""
    sizes = BATCH_SIZES[:1] if options.quick else BATCH_SIZES
    groups = []
    for size in sizes:
        title = f"strong scaling: global batch {size}, shared by all workers"
        groups.append(measure_in_turns(title, strong_scaling(size), options))
    for size in sizes:
        title = f"weak scaling: batch {size} for each worker"
        groups.append(measure_in_turns(title, weak_scaling(size), options))
    return {"groups": groups}


def strong_scaling(batch_size: int) -> list[Configuration]:
    """All levels at one global batch, whatever the number of workers."""
    return configurations([workers for workers in world_sizes() if batch_size % workers == 0], batch_size)


def weak_scaling(batch_per_worker: int) -> list[Configuration]:
    """All levels, each worker with a batch of its own: the global batch grows with their number."""
    rows = configurations(world_sizes(), batch_per_worker)
    return [replace(row, global_batch_size=row.workers * batch_per_worker) for row in rows]


def world_sizes() -> list[int]:
    """Every number of GPUs that there is; without GPUs 1 and 2."""
    return [*range(1, torch.cuda.device_count() + 1)] or [1, 2]


def configurations(worker_counts: list[int], global_batch_size: int) -> list[Configuration]:
    """Level 00 on one device, the others on several; where a device is a part of the cores, level 00 with all too."""
    cores = cores_of_a_device(max(worker_counts))
    several = [workers for workers in worker_counts if workers > 1] or [1]  # on one GPU all levels have one worker
    rows = [Configuration(BASELINE, 1, global_batch_size, cores)]
    for level in ladder.LEVELS[1:]:
        for workers in several:
            rows.append(Configuration(level, workers, global_batch_size, cores))
    is_part_of_the_cores = cores is not None and cores < available_cores()
    if is_part_of_the_cores:
        rows.append(Configuration(BASELINE, 1, global_batch_size, available_cores(), all_cores=True))
    return rows


def cores_of_a_device(devices: int) -> int | None:
    """The number of cores of each device; None on GPUs, and if there are too few cores: then all devices share them."""
    if torch.cuda.is_available() or available_cores() < devices:
        return None
    return available_cores() // devices


def measure_in_turns(title: str, rows: list[Configuration], options: MeasureOptions) -> dict:
    """The record of a group. All rows are compared with level 00, those of levels 03 and 04 also with level 02."""
    steps = FEW_STEPS if options.quick else choose_steps(rows, options.data_flags)
    contestants = {row.name: partial(row.run, steps, options.data_flags) for row in rows}
    results = take_turns(contestants, range(options.rounds))
    samples = {}
    facts = {}
    for row in rows:
        samples[row.name] = [result["images_per_sec"] for result in results[row.name]]
        last = results[row.name][-1]
        facts[row.name] = {
            **asdict(row),
            "steps": steps.counted,
            "device": last["device"],
            "backend": last["backend"],
            "dataset": last["dataset"],
        }
    pairs = [Pair(row.name, BASELINE, "ratio") for row in rows if row.name != BASELINE]
    for row in rows:
        if row.level in ladder.DISTRIBUTED and row.level != RAW_DDP:
            pairs.append(Pair(row.name, replace(row, level=RAW_DDP).name, "ratio"))
    return records.group(title, "images/s", samples, facts, pairs)


def choose_steps(rows: list[Configuration], data_flags: tuple[str, ...]) -> Steps:
    """One number of steps for all rows: those of SECONDS_OF_A_SAMPLE here, or of half an epoch if that is shorter."""
    counted = steps_of_a_sample(FEW_STEPS, rows, data_flags)
    if not torch.cuda.is_available():
        return Steps(WARM_UP_STEPS, counted)
    # The clocks of a GPU need about half a second to settle, so a warm-up is as long as a sample. The first trial had a
    # shorter one and its steps were slow, so a second trial measures their number again.
    counted = steps_of_a_sample(Steps(counted, counted), rows, data_flags)
    return Steps(counted, counted)


def steps_of_a_sample(trial: Steps, rows: list[Configuration], data_flags: tuple[str, ...]) -> int:
    """The steps that the median row takes in SECONDS_OF_A_SAMPLE, by a trial of each row; at most half an epoch."""
    results = [row.run(trial, data_flags) for row in rows]
    seconds = statistics.median(result["global_batch_size"] / result["images_per_sec"] for result in results)
    # Warm-up and sample have to fit into one epoch, and the warm-up may be as long as the sample.
    half_epoch = SIZES["train"] // max(row.global_batch_size for row in rows) // 2
    return min(max(FEW_STEPS.counted, round(SECONDS_OF_A_SAMPLE / seconds)), half_epoch)
