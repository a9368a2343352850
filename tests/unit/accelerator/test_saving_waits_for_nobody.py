"""Ranks save without waiting for each other: a checkpoint is whole if one is killed, comes late or never saves."""

import itertools
import pkgutil
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from common.accelerator import Accelerator
from common.accelerator.remote_errors import RemoteError
from common.accelerator.state import PartialState
from common.accelerator.utils import ProjectConfiguration, checkpoint_folder, gather_object
from tests.states import forget_states
from tests.unit.accelerator.several_processes import on_ranks


class Loaded(NamedTuple):
    """The step of what a rank has loaded of a checkpoint; None if its random state was not loaded."""

    weights_step: float
    random_step: int | None


UNTOUCHED_SEED = 9  # Of no step: it would be rank 9's, and there are at most four ranks.


class Run:
    """A rank's part of a run. At step n the bias of the model is n, and the seed of rank r is 10 * n + r."""

    def __init__(self, folder: Path, **config) -> None:
        forget_states()
        self.accelerator = Accelerator(project_config=ProjectConfiguration(folder, **config), cpu=True)
        self.prepared = self.accelerator.prepare(torch.nn.Linear(1, 1))
        self.model = self.accelerator.unwrap_model(self.prepared)
        self.rank = self.accelerator.process_index

    def step(self, number: int) -> None:
        torch.nn.init.constant_(self.model.bias, number)
        torch.manual_seed(10 * number + self.rank)

    def save(self, number: int, folder: Path | None = None, *, all_ranks: bool = False) -> None:
        self.step(number)
        self.accelerator.save_state(folder, all_ranks=all_ranks)

    def load(self, folder: Path | None = None) -> Loaded:
        torch.manual_seed(UNTOUCHED_SEED)
        self.accelerator.load_state(folder)
        seed = torch.initial_seed()
        random_step = None if seed == UNTOUCHED_SEED else (seed - self.rank) // 10
        return Loaded(self.model.bias.item(), random_step)


class Interruption(NamedTuple):
    """A save of several ranks, one of which is killed.

    Attributes:
        numbered: the save has a folder of its own, for which the older one makes room. Otherwise it is over the older.
        all_ranks: the save has the parts of all ranks or none.
    """

    world: int
    killed_rank: int
    numbered: bool = False
    all_ranks: bool = False


class Killed(Exception):
    """Stands for the end of the process. With `all_ranks` the others get an error, as when a connection breaks."""


FILE_OPERATIONS = ["os.rename", "os.replace", "os.mkdir", "os.unlink", "os.rmdir", "io.open", "torch.save"]


@contextmanager
def killed_after(operations: int) -> Iterator[None]:
    """The file operation after so many raises Killed."""
    done = itertools.count()

    def interruptible(function):
        def run_unless_killed(*args, **kwargs):
            if next(done) >= operations:
                raise Killed
            return function(*args, **kwargs)

        return run_unless_killed

    with pytest.MonkeyPatch.context() as patched:
        for name in FILE_OPERATIONS:
            patched.setattr(name, interruptible(pkgutil.resolve_name(name)))
        yield


def loadable(case: Interruption, rank: int, all_saved: bool) -> list[Loaded]:
    """All that the checkpoint on the disk may hold for a rank after the interrupted save of step 2 over step 1."""
    old = Loaded(weights_step=1, random_step=1)
    new = Loaded(weights_step=2, random_step=2)
    new_without_the_part_of_this_rank = Loaded(weights_step=2, random_step=None)
    if all_saved:
        return [new]
    if rank == case.killed_rank != 0 and not case.all_ranks:
        return [old, new, new_without_the_part_of_this_rank]
    return [old, new]


def save_is_complete(folder: Path, case: Interruption, operations: int) -> bool:
    """True if all ranks come to the end of a save in which one is killed after so many file operations.

    first run:   all save step 1, all save step 2 but one is killed
    second run:  all load what is on the disk, save step 3 and load it
    """
    naming = {"automatic_checkpoint_naming": True, "total_limit": 1} if case.numbered else {}
    place = None if case.numbered else folder / "c"

    run = Run(folder, **naming)
    run.save(1, place)
    run.accelerator.wait_for_everyone()
    limit = operations if run.rank == case.killed_rank else sys.maxsize
    is_saved = False
    with suppress(Killed, RemoteError), killed_after(limit):
        run.save(2, place, all_ranks=case.all_ranks)
        is_saved = True
    all_saved = all(gather_object([is_saved]))

    run = Run(folder, **naming)
    loaded = run.load(place)
    assert loaded in loadable(case, run.rank, all_saved), f"killed after {operations} file operations"
    assert len({each.weights_step for each in gather_object([loaded])}) == 1, "ranks have loaded different checkpoints"
    run.save(3, place)
    assert run.load(place) == Loaded(3, 3), f"the run does not go on after {operations} file operations"
    return all_saved


def operations_of_a_save(_, root: Path, case: Interruption) -> int:
    """The number of file operations of a save, each of which has been interrupted. After a failure begin with it."""
    for operations in itertools.count():
        if save_is_complete(root / str(operations), case, operations):
            return operations


@pytest.mark.parametrize(
    "case",
    [
        Interruption(world=1, killed_rank=0, numbered=True),
        pytest.param(Interruption(world=1, killed_rank=0), marks=pytest.mark.slow),
        pytest.param(Interruption(world=2, killed_rank=0, all_ranks=True), marks=pytest.mark.slow),
        pytest.param(Interruption(world=2, killed_rank=1), marks=pytest.mark.slow),
        pytest.param(Interruption(world=2, killed_rank=1, all_ranks=True), marks=pytest.mark.slow),
        pytest.param(Interruption(world=2, killed_rank=0, numbered=True), marks=pytest.mark.slow),
        pytest.param(Interruption(world=2, killed_rank=1, numbered=True, all_ranks=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_interruption_at_any_file_operation_leaves_a_complete_checkpoint(case, tmp_path):
    assert on_ranks(case.world, operations_of_a_save, tmp_path, case)[case.killed_rank] > 3


def saved_alone(_, folder: Path) -> Loaded:
    """The steps that are loaded after all ranks have saved step 0, and the main process alone step 1."""
    run = Run(folder)
    run.save(0, folder / "c")
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        run.save(1, folder / "c")
    return run.load(folder / "c")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_main_process_alone_may_save_over_what_all_have_saved(world, tmp_path):
    """The random states of the other ranks are of another save, so they are not loaded."""
    main = Loaded(weights_step=1, random_step=1)
    other = Loaded(weights_step=1, random_step=None)
    assert on_ranks(world, saved_alone, tmp_path) == [main, other, other][:world]


def saved_alone_then_together(_, folder: Path) -> Loaded:
    """The steps that are loaded after the main process has saved once more than the others."""
    run = Run(folder, automatic_checkpoint_naming=True)
    dist.monitored_barrier()  # Ids contain torch's count of collectives; this call makes it differ between the ranks.
    if run.accelerator.is_main_process:
        run.save(0)
    run.save(1, all_ranks=True)
    return run.load()


def test_all_save_to_one_folder_after_the_main_process_has_saved_alone(tmp_path):
    assert on_ranks(3, saved_alone_then_together, tmp_path) == [Loaded(weights_step=1, random_step=1)] * 3
    assert not list(tmp_path.glob("checkpoints/.*"))


def saved_in_a_window(_, folder: Path) -> dict:
    """What is loaded after the main process alone has saved. Hooks of the script save and load the weights."""
    run = Run(folder)
    accelerator = run.accelerator
    accelerator.gradient_accumulation_steps = 2

    def save_hook(models, weights, draft):
        Path(draft, "weights").write_text(str(weights.pop()["bias"].item()))

    def load_hook(models, draft):
        torch.nn.init.constant_(accelerator.unwrap_model(models.pop()).bias, float(Path(draft, "weights").read_text()))

    accelerator.register_save_state_pre_hook(save_hook)
    accelerator.register_load_state_pre_hook(load_hook)
    with accelerator.accumulate(run.prepared):
        accelerator.backward(run.prepared(torch.full((1, 1), 2.0 + run.rank)).sum())
    assert run.model.weight.grad.item() == (2.0 + run.rank) / 2, "ranks do not differ within a window"
    if accelerator.is_main_process:
        run.save(1, folder / "c")
    accelerator.wait_for_everyone()
    run.step(2)
    accelerator.step = 0
    loaded = run.load(folder / "c")
    return {"loaded": loaded, "gradient": run.model.weight.grad.item(), "micro_step": accelerator.step}


def test_in_the_middle_of_a_window_the_others_go_on_with_the_gradients_of_the_main_process(tmp_path):
    main, other = on_ranks(2, saved_in_a_window, tmp_path)
    assert main == {"loaded": Loaded(weights_step=1, random_step=1), "gradient": 1.0, "micro_step": 1}
    assert other == {"loaded": Loaded(weights_step=1, random_step=None), "gradient": 1.0, "micro_step": 1}


def saved_in_two_micro_steps(_, folder: Path) -> int:
    """The number of micro-steps in the checkpoint that is loaded.

    rank 0: micro-step 1, save    micro-step 2, save that fails
    rank 1: micro-step 1          micro-step 2, save
    """
    run = Run(folder)
    accelerator = run.accelerator
    accelerator.gradient_accumulation_steps = 4

    def train() -> None:
        with accelerator.accumulate(run.prepared):
            accelerator.backward(run.prepared(torch.ones(1, 1)).sum())

    def fail(*_) -> None:
        raise KeyError

    train()
    if accelerator.is_main_process:
        accelerator.save_state(folder / "c")
        accelerator.register_save_state_pre_hook(fail)
    train()
    with suppress(KeyError):
        accelerator.save_state(folder / "c")
    accelerator.load_state(folder / "c")
    return accelerator.step


def test_parts_of_two_micro_steps_are_no_checkpoint(tmp_path):
    """No collective lies between them, because the ranks average at the end of a window."""
    assert on_ranks(2, saved_in_two_micro_steps, tmp_path) == [1, 1]


def tell(event: str) -> None:
    """Tell the other rank, without a collective: ids of saves contain their count."""
    dist.distributed_c10d._get_default_store().set(event, "")


def wait_until(event: str) -> None:
    dist.distributed_c10d._get_default_store().wait([event])


def save_in_time(run: Run) -> None:
    run.save(0)
    tell("rank 0 has made save 0")
    wait_until("rank 1 has begun save 0")
    run.save(1)
    run.save(2)
    run.save(3)
    tell("rank 0 has made save 3")


def save_late(run: Run) -> None:
    def come_late(*_) -> None:
        tell("rank 1 has begun save 0")
        wait_until("rank 0 has made save 3")

    def fail(*_) -> None:
        raise KeyError

    wait_until("rank 0 has made save 0")
    run.accelerator.register_save_state_pre_hook(come_late)
    run.save(0)
    failing = run.accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(KeyError):
        run.save(1)
    failing.remove()
    run.save(2)
    run.save(3)


def saved_in_time_and_late(_, folder: Path) -> Loaded:
    """What is loaded after four saves, each of which removes the checkpoint before.

        rank 0: save 0                  saves 1, 2 and 3
        rank 1:         save 0 begins                     save 0 ends, save 1 fails, saves 2 and 3

    The save that fails uses up a number, because the main process has saved.
    """
    run = Run(folder, automatic_checkpoint_naming=True, total_limit=1)
    save_all = save_in_time if run.accelerator.is_main_process else save_late
    save_all(run)
    return run.load()


def test_a_rank_that_comes_late_completes_the_checkpoint_that_is_still_there(tmp_path):
    assert on_ranks(2, saved_in_time_and_late, tmp_path) == [Loaded(weights_step=3, random_step=3)] * 2
    assert [path.name for path in tmp_path.glob("checkpoints/checkpoint_*")] == ["checkpoint_3"]


def complete_draft(folder: Path, save_id: str) -> Path:
    """A part of this rank whose only file says of which save it is."""
    rank = PartialState().process_index
    draft = checkpoint_folder.draft_of_this_rank(folder)
    draft.mkdir()
    (draft / f"file_{rank}").write_text(save_id)
    checkpoint_folder.complete_draft(draft, save_id, is_main_part=rank == 0)
    return draft


def publish_early(folder: Path) -> None:
    checkpoint_folder.publish_rank_part(complete_draft(folder, "first"), folder, "first")
    checkpoint_folder.remove(complete_draft(folder, "second"))
    tell("rank 1 has failed")
    wait_until("rank 0 is about to remove")
    checkpoint_folder.publish_rank_part(complete_draft(folder, "third"), folder, "third")
    tell("rank 1 has made its third part")


def publish_and_remove_late(folder: Path) -> None:
    def remove_late(path: Path, *, rmtree=shutil.rmtree) -> None:
        tell("rank 0 is about to remove")
        wait_until("rank 1 has made its third part")
        rmtree(path)

    wait_until("rank 1 has failed")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shutil, "rmtree", remove_late)
        checkpoint_folder.publish_main_part(complete_draft(folder, "first"), folder)
    assert (folder / "file_1").read_text() == "first", "the first part of rank 1 is lost"
    checkpoint_folder.publish_main_part(complete_draft(folder, "third"), folder)
    assert (folder / "file_1").read_text() == "third", "the third part of rank 1 is lost"


def published_early_and_late(_, folder: Path) -> None:
    """Rank 1 makes its part of "third" while rank 0 is about to remove the folder that had its part of "first".

    rank 0:                                saves "first" until …                    … removes, saves "third"
    rank 1: part of "first", fails in "second"                    part of "third"
    """
    publish = publish_and_remove_late if PartialState().process_index == 0 else publish_early
    publish(folder)


def test_a_rank_that_comes_early_and_fails_in_its_second_save_loses_no_part(tmp_path):
    on_ranks(2, published_early_and_late, tmp_path / "c")
    assert not list(tmp_path.rglob(".*"))


def saved_in_each_others_way(_, folder: Path) -> Loaded:
    """The steps that are loaded. Hooks of ranks 1 and 2 write one file, and rank 3 one where rank 0 has a folder."""
    run = Run(folder)
    name = ["note/file", "text", "text", "note"][run.rank]

    def hook(models, weights, draft):
        Path(draft, name).parent.mkdir(exist_ok=True)
        Path(draft, name).write_text(f"of rank {run.rank}")

    run.accelerator.register_save_state_pre_hook(hook)
    run.save(1, folder / "c", all_ranks=True)
    return run.load(folder / "c")


def test_a_part_that_is_in_the_way_of_others_damages_no_checkpoint(tmp_path):
    whole = Loaded(weights_step=1, random_step=1)
    left_out = Loaded(weights_step=1, random_step=None)
    assert on_ranks(4, saved_in_each_others_way, tmp_path) == [whole, whole, whole, left_out]
