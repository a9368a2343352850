"""Ids of saves. The parts of one checkpoint on the disk are those that have the same id.

At the same `save_state` all ranks get the same id, though none waits for another. Two saves into one folder have
different ids, and so have two runs. With `all_ranks=True` rank 0 sends its id to the others. Else each rank derives it
from what all of them know: the name of the run, the number of collectives so far, the micro-batches since the last
optimizer step, and the number of saves into the folder since then.

    save_state("a")                         run-5-0-1
    if is_main_process: save_state("b")     run-5-0-1, into another folder
    save_state("a")                         run-5-0-2
    with accumulate(): … ; save_state("a")  run-5-1-1, where the window goes on, so no gradient was averaged
    wait_for_everyone(); save_state("a")    run-6-1-1

Three things break the promise. Then the newest checkpoint has no part of rank 1, and loading says so:

    rank 0 saves "a" alone, and then all do,  Rank 1's part belongs to what rank 0 has saved alone. That is the newest
    with no collective between                checkpoint if rank 0 fails in the second save.
    rank 0 saves alone under automatic        From then on rank 0 writes checkpoint_1, and rank 1 its part of
    naming                                    checkpoint_0, until `load_state()` or a save with `all_ranks=True`.
    `send`, `recv`, `monitored_barrier`       gloo counts these too, but not equally on all ranks.
"""

import uuid
from collections import Counter
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

# The numbers of saves into a folder at one moment of the run, by all Accelerators of this process.
_num_saves: Counter[tuple[str, Path]] = Counter()
# The name of a run, by its process group: its processes have it in common, and no other run has it.
_names_of_runs: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def next_id(folder: Path, micro_step: int) -> str:
    """The id of the save into `folder` that begins now, after so many micro-batches of an accumulation window."""
    if not dist.is_initialized():
        return uuid.uuid4().hex
    group: Any = dist.group.WORLD
    # The store is asked once. It belongs to torchrun, which may have been killed before the last save.
    if group not in _names_of_runs:
        # The first rank that comes here chooses the name. The store keeps it for the others, and none of them waits.
        store = dist.distributed_c10d._get_default_store()
        _names_of_runs[group] = store.compare_set("checkpointing/run", "", uuid.uuid4().hex).decode()
    # A count of our own would have to grow in each collective of the script, of the core, of DDP and of FSDP: torch's
    # does, and is the same on all ranks whatever each of them saves. It is not documented:
    # `test_ids_are_the_same_on_all_ranks_and_differ_between_saves_into_one_folder` fails if torch changes it.
    moment = f"{_names_of_runs[group]}-{group._get_sequence_number_for_group()}-{micro_step}"
    _num_saves[moment, folder] += 1
    return f"{moment}-{_num_saves[moment, folder]}"
