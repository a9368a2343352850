"""Each rank derives by itself the id that its part of a save has in common with the parts of the others."""

from pathlib import Path

import torch
import torch.distributed as dist

from common.accelerator import Accelerator
from common.accelerator.utils import save_ids
from tests.unit.accelerator.several_processes import on_ranks


def ids_of_saves(accelerator: Accelerator, folder: Path) -> list[str]:
    """The ids of two saves, of one within a window, and after collectives: a barrier, one of the core, those of DDP."""
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    ids = [save_ids.next_id(folder, 0), save_ids.next_id(folder, 1)]
    if accelerator.is_main_process:
        save_ids.next_id(folder / "another", 0)  # This changes nothing.
    ids.append(save_ids.next_id(folder, 0))
    accelerator.wait_for_everyone()
    ids.append(save_ids.next_id(folder, 0))
    accelerator.reduce(torch.ones(1))
    ids.append(save_ids.next_id(folder, 0))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    return [*ids, save_ids.next_id(folder, 0)]


def test_ids_are_the_same_on_all_ranks_and_differ_between_saves_into_one_folder(tmp_path):
    first, second = on_ranks(2, ids_of_saves, tmp_path)
    assert first == second and len(set(first)) == 6


def test_another_run_has_other_ids(tmp_path):
    ids = set()
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        ids.add(save_ids.next_id(tmp_path, 0))
        dist.destroy_process_group()
    assert len(ids) == 2
