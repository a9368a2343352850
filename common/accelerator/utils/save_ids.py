"""Ids of saves in which no rank waits for another: two parts belong to one save if they have the same id.

All ranks find the id by themselves. It is made of the name of the run, the number of collectives so far, and the number
of saves into the folder since then:

    save_state("a")                       run-5-1
    if is_main_process: save_state("b")   run-5-1 in another folder, on rank 0 alone
    save_state("a")                       run-5-2
    wait_for_everyone(); save_state("a")  run-6-1

The number of collectives is the clock of the run: all ranks must have entered the same ones when they come to a line of
the script. One case fails. If rank 0 alone saves "a", and then all ranks save "a" with no collective between, rank 0
has the id run-5-2 and rank 1 has run-5-1. The part of rank 1 is never merged, and loading says so. With
`all_ranks=True` it cannot happen, because rank 0 sends an id to the others.
"""

import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist

# By moment and folder. It is not kept in an Accelerator, because two of them may save into one folder.
_num_saves: Counter[tuple[str, Path]] = Counter()


def next_id(folder: Path) -> str:
    """The id of the save into `folder` that begins now."""
    moment = f"{name_of_run()}-{num_collectives()}"
    _num_saves[moment, folder] += 1
    return f"{moment}-{_num_saves[moment, folder]}"


def name_of_run() -> str:
    """A name that the processes of this run have in common, and no other run has; a new one without a process group."""
    name = uuid.uuid4().hex
    if not dist.is_initialized():
        return name
    # The first rank that comes here chooses the name. The store keeps it for the others, and none of them waits.
    store = dist.distributed_c10d._get_default_store()
    return store.compare_set("checkpointing/run", "", name).decode()


def num_collectives() -> int:
    """The collectives that this process has entered, whoever called them: the script, DDP or this core.

    torch does not document this count, but no other one is the same on all ranks whatever each of them saves. If torch
    changes it, `test_torch_counts_the_collectives_alike_on_all_ranks` fails.
    """
    group: Any = dist.group.WORLD
    return 0 if group is None else group._get_sequence_number_for_group()
