"""Ids of saves, which all ranks find without asking each other, and the ranks that the next save expects."""

import contextlib
import uuid
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from .checkpoint_folder import Part
from .checkpoint_manifest import CheckpointError, read_manifest


@dataclass
class SaveHistory:
    """What one Accelerator remembers of its saves on this process.

    Two parts belong to one save if they have the same id. The id has three components: the name of the run, the number
    of collectives so far, and the number of saves since the last collective. All ranks have entered equally many
    collectives when they are at the same line of a script, so they find the same id even where only some of them save.

    Attributes:
        own_name: the name of a run without a process group.
        position: the first two components of the last id.
        saves_at_position: its third component.
        last_part: the part that this process wrote in the last save without `all_ranks`.
        ranks: the ranks that took part in that save, or in the one whose checkpoint was loaded since.
    """

    own_name: str = field(default_factory=lambda: uuid.uuid4().hex)
    position: str = ""
    saves_at_position: int = 0
    last_part: Part | None = None
    ranks: set[int] = field(default_factory=set)

    def name_of_run(self) -> str:
        """A name that the processes of this run have in common, and no other run has."""
        if not dist.is_initialized():
            return self.own_name
        # The first rank that comes here chooses the name. The store keeps it for the others, and none of them waits.
        store = dist.distributed_c10d._get_default_store()
        return store.compare_set("checkpointing/run", "", self.own_name).decode()

    def next_id(self) -> str:
        """The id of the save that begins now."""
        group: Any = dist.group.WORLD
        num_collectives = 0 if group is None else group._get_sequence_number_for_group()
        position = f"{self.name_of_run()}-{num_collectives}"
        self.saves_at_position = self.saves_at_position + 1 if position == self.position else 1
        self.position = position
        return f"{position}-{self.saves_at_position}"

    def expected_ranks(self, world_size: int) -> set[int]:
        """The ranks of this run that took part in the last save, as far as its files still say so."""
        if self.last_part is not None:
            with contextlib.suppress(CheckpointError):  # rotation has removed it
                manifest = read_manifest(self.last_part.folder)
                if manifest.save_id == self.last_part.save_id:
                    self.ranks = set(manifest.ranks)
        return {rank for rank in self.ranks if rank < world_size}
