"""Steps, training time and throughput of a run."""

import time

import torch

WARM_UP_STEPS = 10


class Meter:
    """Steps, training time without evaluation, and steady-state throughput.

    The steady state begins after WARM_UP_STEPS steps of this process; fewer steps are measured as a whole. The device
    is synchronised before a clock is read, which happens once at the warm-up's end and twice an epoch.
    """

    def __init__(self, device: torch.device, images_per_step: int) -> None:
        self.device = device
        self.images_per_step = images_per_step
        self.steps = 0
        self.seconds = 0.0
        self._resumed_steps = 0
        self._resumed_seconds = 0.0
        self._steady_seconds = 0.0
        self._steady_since: float | None = None

    def resume(self, steps: int, seconds: float) -> None:
        """Go on from what another process has counted."""
        self.steps = self._resumed_steps = steps
        self.seconds = self._resumed_seconds = seconds

    def start(self) -> None:
        """An epoch's training begins."""
        self._began = self._now()
        if self._own_steps >= WARM_UP_STEPS:
            self._steady_since = self._began

    def step(self) -> None:
        """One optimizer step has been taken."""
        self.steps += 1
        if self._own_steps == WARM_UP_STEPS:
            self._steady_since = self._now()

    def stop(self) -> None:
        """The epoch's training has ended; what follows, such as evaluation, is not counted."""
        now = self._now()
        self.seconds += now - self._began
        if self._steady_since is not None:
            self._steady_seconds += now - self._steady_since
            self._steady_since = None

    @property
    def images_per_sec(self) -> float:
        steps = self._own_steps - WARM_UP_STEPS
        seconds = self._steady_seconds
        if steps <= 0:
            steps = self._own_steps
            seconds = self.seconds - self._resumed_seconds
        return steps * self.images_per_step / seconds if seconds else 0.0

    @property
    def _own_steps(self) -> int:
        return self.steps - self._resumed_steps

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()
