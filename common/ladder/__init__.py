"""The ladder as a reader climbs it: which levels there are, how to load them, what changes between them.

`scripts` knows the levels and their files, `diffs` what changes from one to the next; `tour` is what
`python -m common.ladder` greets with.
"""

from common.ladder.diffs import changed_lines, diff, unified
from common.ladder.scripts import (
    DISTRIBUTED,
    FSDP,
    FULL,
    MESH,
    ROOT,
    SHARDED,
    docstring_end,
    file_name,
    is_distributed,
    level_of,
    levels,
    load,
    named,
    rungs,
    script,
    short_name,
    source,
    steps,
    story,
    with_checkpoints,
)

__all__ = [
    "DISTRIBUTED",
    "FSDP",
    "FULL",
    "MESH",
    "ROOT",
    "SHARDED",
    "changed_lines",
    "diff",
    "docstring_end",
    "file_name",
    "is_distributed",
    "level_of",
    "levels",
    "load",
    "named",
    "rungs",
    "script",
    "short_name",
    "source",
    "steps",
    "story",
    "unified",
    "with_checkpoints",
]
