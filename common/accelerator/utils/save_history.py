"""Ids of saves, which all ranks find without asking each other, and the ranks that the next save expects."""

import contextlib
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .checkpoint_folder import Part
from .checkpoint_manifest import CheckpointError, read_manifest

# Not counted for each Accelerator, because two of them may save into one folder.
_num_saves: Counter[tuple[str, Path]] = Counter()


@dataclass
class SaveHistory:
    """What one Accelerator remembers of its saves on this process.

    Two parts belong to one save if they have the same id. It is made of the name of the run, the number of collectives
    so far, and the number of saves into the folder since then:

        save_state("a")                       run-5-1
        if is_main_process: save_state("b")   run-5-1 in another folder, on rank 0 alone
        save_state("a")                       run-5-2
        wait_for_everyone(); save_state("a")  run-6-1

    So all ranks find the same id by themselves. torch counts the collectives of the default group, and all ranks must
    have entered the same ones when they come to a line of the script.

    Attributes:
        own_name: the name of a run without a process group.
        last_part: the part that this process wrote in the last save without `all_ranks`.
        ranks: the ranks that took part in that save, or in the one whose checkpoint was loaded since.
    """

    own_name: str = field(default_factory=lambda: uuid.uuid4().hex)
    last_part: Part | None = None
    ranks: set[int] = field(default_factory=set)

    def name_of_run(self) -> str:
        """A name that the processes of this run have in common, and no other run has."""
        if not dist.is_initialized():
            return self.own_name
        # The first rank that comes here chooses the name. The store keeps it for the others, and none of them waits.
        store = dist.distributed_c10d._get_default_store()
        return store.compare_set("checkpointing/run", "", self.own_name).decode()

    def next_id(self, folder: Path) -> str:
        """The id of the save into `folder` that begins now."""
        group: Any = dist.group.WORLD
        num_collectives = 0 if group is None else group._get_sequence_number_for_group()
        since_when = f"{self.name_of_run()}-{num_collectives}"
        _num_saves[since_when, folder] += 1
        return f"{since_when}-{_num_saves[since_when, folder]}"

    def expected_ranks(self, world_size: int) -> set[int]:
        """The ranks of this run that took part in the last save, as far as its files still say so."""
        if self.last_part is not None:
            with contextlib.suppress(CheckpointError):  # rotation has removed it
                manifest = read_manifest(self.last_part.folder)
                if manifest.save_id == self.last_part.save_id:
                    self.ranks = set(manifest.ranks)
        return {rank for rank in self.ranks if rank < world_size}
