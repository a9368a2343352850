"""What each device does in one step of a level's own script: the lanes of the main page's picture."""

from functools import partial

from benchmarks.harness import typical_steps
from benchmarks.harness.groups import CannotMeasure, Group, MeasureOptions
from benchmarks.harness.level_lanes import record_level
from benchmarks.harness.typical_steps import Recording
from benchmarks.suites.throughput import Configuration, Steps
from common import ladder
from common.cores import available_cores
from common.processes import ranks

BATCH_SIZE = 64
DEVICES = 2
WARM_UP_STEPS = 3  # DDP has its final buckets from the second step on
TITLE = f"one step of {BATCH_SIZE} images, a device is 1/{DEVICES} of the cores"
SCRIPTS = {
    "00, one device": Configuration("00_single_gpu", 1, BATCH_SIZE),
    "01, DataParallel": Configuration("01_data_parallel", DEVICES, BATCH_SIZE),
    "02, DDP": Configuration("02_ddp_raw", DEVICES, BATCH_SIZE),
    "FSDP": Configuration(ladder.FSDP, DEVICES, BATCH_SIZE),
}


def groups() -> list[Group]:
    return [Group("one_step", TITLE, tuple(SCRIPTS), measure_group)]


def measure_group(options: MeasureOptions) -> dict:
    """The record of all rows."""
    if available_cores() < DEVICES:
        raise CannotMeasure(f"{DEVICES} devices need as many cores")
    return typical_steps.measure_group(TITLE, tuple(SCRIPTS), partial(devices_of, options.data_flags), options)


def devices_of(data_flags: tuple[str, ...], row: str, steps: int) -> Recording:
    """Of each device the recorded steps of one run, after the warm-up."""
    script = SCRIPTS[row]
    cores = available_cores() // DEVICES
    of_run = Steps(1 + WARM_UP_STEPS, steps)  # the first step is not recorded
    argv = [*script.argv(of_run), "--device", "cpu", "--cores-per-device", str(cores), *data_flags]
    recording = []
    for of_rank in ranks(script.processes, on_cpu=True).run(record_level, script.level, argv, cores):
        recording += [own[WARM_UP_STEPS:] for own in of_rank]
    return recording
