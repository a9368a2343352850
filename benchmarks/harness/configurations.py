"""Configurations: a level on so many devices with a global batch, as a row of a table times it."""

from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.harness.level_runs import flags_on, run_level, run_on_devices
from benchmarks.harness.rows import BASELINE, REPLICATED
from common.instruments.result import quantity


class Steps(NamedTuple):
    """The steps of one sample: those of a warm-up, which are not counted, and those that are."""

    warm_up: int
    counted: int


@dataclass(frozen=True)
class Configuration:
    """A level, or a script beside it, as one row measures it.

    Attributes:
        workers: processes, or at level 01 replicas. Each has a device of its own.
        cores_per_device: the cores of each device; None where devices are not made of cores.
        all_cores: the row apart, whose one device has all cores.
    """

    level: str
    workers: int
    global_batch_size: int
    cores_per_device: int | None = None
    all_cores: bool = False

    @property
    def name(self) -> str:
        if self.all_cores:
            return f"{self.level}, all cores"
        if self.level == BASELINE:
            return self.level
        worker = "replica" if self.level == REPLICATED else "process"
        return f"{self.level}, {quantity(self.workers, worker)}"

    def argv(self, steps: Steps) -> list[str]:
        """The level's flags for these steps, without those of the data."""
        argv = flags_on(self.level, self.workers, self.global_batch_size)
        argv += ["--eval-samples", str(self.workers)]  # one for each rank, because evaluation is not timed
        argv += ["--warm-up-steps", str(steps.warm_up), "--max-steps", str(steps.warm_up + steps.counted)]
        if self.cores_per_device is not None:
            argv += ["--cores-per-device", str(self.cores_per_device)]
        return argv

    def run(self, steps: Steps, data_flags: tuple[str, ...]) -> dict:
        """The slowest rank's result of a training of these steps. Raises RankFailed if a rank fails."""
        results = run_on_devices(run_level, self.level, self.workers, [*self.argv(steps), *data_flags])
        return min(results, key=lambda result: result["images_per_sec"])
