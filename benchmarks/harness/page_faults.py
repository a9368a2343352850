"""Page faults per optimizer step: whether the steps that are timed pay for memory that the kernel fills with zeros."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim.optimizer import register_optimizer_step_post_hook

from common.allocator import minor_faults

# Every recorded row of a CPU stays below it, and a test holds the records to that; see `common.allocator`.
MOST_PER_STEP = 1000


class FaultsPerStep:
    """Minor faults of this process after each optimizer step."""

    def __init__(self) -> None:
        self.readings: list[int] = []

    def note(self, *_) -> None:
        faults = minor_faults()
        if faults is not None:
            self.readings.append(faults)

    def after(self, warm_up: int) -> float | None:
        """The mean per step, after so many steps; None where nobody counts, or there are too few steps."""
        steps = len(self.readings) - warm_up
        if steps < 1 or warm_up < 1:
            return None
        return (self.readings[-1] - self.readings[warm_up - 1]) / steps


@contextmanager
def counting() -> Iterator[FaultsPerStep]:
    """Count during all optimizer steps of this process, whoever takes them."""
    counter = FaultsPerStep()
    hook = register_optimizer_step_post_hook(counter.note)
    try:
        yield counter
    finally:
        hook.remove()


def remarks(rows: dict[str, dict]) -> list[str]:
    """A sentence about each row whose steps take MOST_PER_STEP faults or more."""
    found = []
    for name, row in rows.items():
        faults = row.get("minor_faults_per_step")
        if faults is not None and faults >= MOST_PER_STEP:
            found.append(f"{name}: {faults:.0f} page faults per step: part of its time is the allocator's.")
    return found
