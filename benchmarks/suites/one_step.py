"""The lanes of each device in one step of a level's own script, for the main page's picture."""

from functools import partial
from itertools import chain

from benchmarks.harness.configurations import Configuration, Steps
from benchmarks.harness.lanes.record_level import record_level
from benchmarks.harness.lanes.spans import RecordedStep
from benchmarks.harness.lanes.typical_steps import record_in_turns
from benchmarks.harness.level_runs import run_on_devices
from benchmarks.harness.options import WARM_UP_STEPS, CannotMeasure, MeasureOptions
from benchmarks.harness.rows import BASELINE, RAW_DDP, REPLICATED
from common import ladder
from common.cores import available_cores

BATCH_SIZE = 64
DEVICES = 2
TITLE = f"one step of {BATCH_SIZE} images, a device is 1/{DEVICES} of the cores"
# Each row's script, and its number of processes or replicas.
SCRIPTS = {
    "00, one device": (BASELINE, 1),
    "01, DataParallel": (REPLICATED, DEVICES),
    "02, DDP": (RAW_DDP, DEVICES),
    "FSDP": (ladder.FSDP, DEVICES),
}


def measure(options: MeasureOptions) -> dict:
    if available_cores() < DEVICES:
        raise CannotMeasure(f"{DEVICES} devices need as many cores")
    group = record_in_turns(TITLE, SCRIPTS, partial(record_devices, options.data_flags), options.rounds)
    return {"groups": [group | {"dataset": options.data_flags[1]}]}


def record_devices(data_flags: tuple[str, ...], row: str, steps: int) -> list[list[RecordedStep]]:
    """The recorded steps of one run after the warm-up, for each device."""
    name, workers = SCRIPTS[row]
    script = Configuration(name, workers, BATCH_SIZE, cores_per_device=available_cores() // DEVICES)
    argv = [*script.argv(Steps(WARM_UP_STEPS, steps)), "--device", "cpu", *data_flags]
    by_rank = run_on_devices(record_level, name, workers, argv, on_cpu=True)
    return [device[-steps:] for device in chain.from_iterable(by_rank)]  # the steps before are the warm-up
