"""What each device does in one step of a level's own script: the lanes of the main page's picture."""

from functools import partial

from benchmarks.harness.groups import CannotMeasure, Group, MeasureOptions
from benchmarks.harness.level_lanes import record_level
from benchmarks.suites import timeline
from benchmarks.suites.throughput import Configuration, Steps
from common.cores import available_cores
from common.processes import ranks

BATCH_SIZE = 64
DEVICES = 2
WARM_UP_STEPS = 3  # DDP has its final buckets from the second step on
TITLE = f"one step of {BATCH_SIZE} images, a device is 1/{DEVICES} of the cores"
# By the name of the row: the script, and the level that its flags are those of.
SCRIPTS = {
    "00, one device": ("00_single_gpu", Configuration("00_single_gpu")),
    "01, DataParallel": ("01_data_parallel", Configuration("01_data_parallel", DEVICES)),
    "02, DDP": ("02_ddp_raw", Configuration("02_ddp_raw", DEVICES)),
    "FSDP": ("02_ddp_raw/train_fsdp", Configuration("02_ddp_raw", DEVICES)),
}


def groups() -> list[Group]:
    return [Group("one_step", TITLE, tuple(SCRIPTS), measure_group)]


def measure_group(options: MeasureOptions) -> dict:
    """The record of all rows: milliseconds a step, and the lanes of a typical one of each device."""
    if available_cores() < DEVICES:
        raise CannotMeasure(f"{DEVICES} devices need as many cores")
    return timeline.record(TITLE, tuple(SCRIPTS), partial(devices_of, options.data_flags), options)


def devices_of(data_flags: tuple[str, ...], row: str, steps: int) -> timeline.Recording:
    """Of each device the recorded steps of one run, after the warm-up."""
    script, level = SCRIPTS[row]
    cores = available_cores() // DEVICES
    flags = ["--device", "cpu", "--cores-per-device", str(cores)]
    of_run = Steps(1 + WARM_UP_STEPS, steps)  # the first step is not recorded
    argv = [*level.argv(of_run), *flags, *data_flags]
    recording = []
    for of_rank in ranks(level.processes, on_cpu=True).run(record_level, script, argv, cores):
        recording += [own[WARM_UP_STEPS:] for own in of_rank]
    return recording
