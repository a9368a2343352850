"""The bytes that each of four ranks holds at level 02: under DDP, with FSDP, and on a mesh of 2 × 2.

`common.memory` counts parameters, gradients and optimizer state at the end of `optimizer.step()`, before `zero_grad()`
frees the gradients. DDP's buckets are left out. Nothing is timed, so the record has rows of bytes and no groups.
"""

from benchmarks.harness import level_runs
from benchmarks.harness.options import MeasureOptions
from benchmarks.harness.rows import RAW_DDP
from common import ladder

RANKS = 4
NAMES = {RAW_DDP: "DDP", ladder.FSDP: "FSDP", ladder.MESH: "mesh of 2 × 2"}


def measure(_: MeasureOptions) -> dict:
    """The bytes of each rank by category, for each script."""
    rows = {}
    for script, name in NAMES.items():
        flags = ["--dataset", "synthetic", *level_runs.flags_on(script, RANKS, 64)]
        rows[name] = level_runs.run_on_devices(level_runs.held, script, RANKS, flags, on_cpu=True)
    return {"rows": rows}
