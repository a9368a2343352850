"""Ids of saves: two parts belong to one save if they have the same id.

Saving waits for nobody, so rank 0 cannot send an id to the others. Each rank derives the same one from two things that
all of them know: the name of the run, and the number of collectives so far.

    save_state("a")                       run-5
    if is_main_process: save_state("b")   run-5, into another folder
    wait_for_everyone(); save_state("a")  run-6

This works because all ranks have entered the same collectives when they come to a line of the script. It has two
limits:

- Two saves into one folder have the same id if there is no collective between them. If a rank takes no part in the
  second, or is killed in it, its part of the first one counts.
- Under automatic naming, the main process may save alone. From then on it writes checkpoint_1, and rank 1 its part of
  checkpoint_0, until `load_state()` or a save with `all_ranks=True` tells all ranks the number of rank 0. Till then no
  part of rank 1 comes to a checkpoint, and loading says so.
"""

import uuid
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

# The names of runs by their process groups.
_names_of_runs: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def save_id() -> str:
    """The id of a save that begins now."""
    if not dist.is_initialized():
        return uuid.uuid4().hex
    return f"{name_of_run()}-{num_collectives()}"


def name_of_run() -> str:
    """A name that the processes of this run have in common, and no other run has."""
    group = dist.group.WORLD
    # The store is asked once. It belongs to torchrun, which may have been killed before the last save.
    if group not in _names_of_runs:
        # The first rank that comes here chooses the name. The store keeps it for the others, and none of them waits.
        store = dist.distributed_c10d._get_default_store()
        _names_of_runs[group] = store.compare_set("checkpointing/run", "", uuid.uuid4().hex).decode()
    return _names_of_runs[group]


def num_collectives() -> int:
    """The collectives of the default group that this process has entered, called by the script, DDP or this core.

    torch does not document this count, but no other one is the same on all ranks whatever each of them saves. If torch
    changes it, `test_all_ranks_have_the_same_id_and_another_one_after_each_collective` fails.
    """
    group: Any = dist.group.WORLD
    return group._get_sequence_number_for_group()
