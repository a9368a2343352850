"""Ids of saves: two parts belong to one save if they have the same id.

Saving waits for nobody, so rank 0 cannot send an id to the others. Each rank derives the same one from three things
that all of them know: the name of the run, the number of collectives so far, and the number of saves into the folder
since then.

    save_state("a")                       run-5-1
    if is_main_process: save_state("b")   run-5-1 in another folder, on rank 0 alone
    save_state("a")                       run-5-2
    wait_for_everyone(); save_state("a")  run-6-1

This works because all ranks have entered the same collectives when they come to a line of the script. In two cases the
part of rank 1 is never added to the checkpoint, and loading says so:

- The main process alone saves "a", and then all ranks save "a" with no collective between. Then rank 0 has the id
  run-5-2 and rank 1 run-5-1.
- The main process alone saves under automatic naming. From then on it writes checkpoint_1, and rank 1 its part of
  checkpoint_0, until `load_state()` or a save with `all_ranks=True` tells all ranks the number of rank 0.
"""

import uuid
from collections import Counter
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

# The numbers of saves into a folder since a collective. All Accelerators of the process count here, because two of them
# may save into one folder.
_num_saves: Counter[tuple[str, Path]] = Counter()
# The names of runs by their process groups.
_names_of_runs: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def next_id(folder: Path) -> str:
    """The id of the save into `folder` that begins now."""
    if not dist.is_initialized():
        return uuid.uuid4().hex
    run_and_collectives = f"{name_of_run()}-{num_collectives()}"
    _num_saves[run_and_collectives, folder] += 1
    return f"{run_and_collectives}-{_num_saves[run_and_collectives, folder]}"


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
    changes it, `test_torch_counts_the_collectives_alike_on_all_ranks` fails.
    """
    group: Any = dist.group.WORLD
    return group._get_sequence_number_for_group()
