"""Ranks save without waiting for each other: a checkpoint is whole if one is killed, comes late or never saves."""

import itertools
import pkgutil
import shutil
import sys
from contextlib import suppress
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
    weights_step: float
    random_step: int | None  # None if this rank's random state was not loaded.


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

    def load(self, folder: Path | None = None) -> Loaded:
        torch.manual_seed(UNTOUCHED_SEED)
        self.accelerator.load_state(folder)
        seed = torch.initial_seed()
        random_step = None if seed == UNTOUCHED_SEED else (seed - self.rank) // 10
        return Loaded(self.model.bias.item(), random_step)


class Killed(Exception):
    """Stands for the end of the process. With `all_ranks` the others get an error, as when a connection breaks."""


FILE_OPERATIONS = ["os.rename", "os.replace", "os.mkdir", "os.unlink", "os.rmdir", "io.open", "torch.save"]


def save_unless_killed(run: Run, place: Path | None, all_ranks: bool, operations: int) -> bool:
    """Save, but die before the file operation after so many. Returns True if the save came to its end."""
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
        try:
            run.accelerator.save_state(place, all_ranks=all_ranks)
        except (Killed, RemoteError):
            return False
    return True


def killed_after(root: Path, operations: int, victim: int, numbered: bool, all_ranks: bool) -> bool:
    """Save step 1, kill the victim after so many file operations of its save of step 2, and load in a new run.

    Returns True if the save has come to its end on all ranks.
    """
    naming = {"automatic_checkpoint_naming": True, "total_limit": 1} if numbered else {}
    folder = root / str(operations)
    place = None if numbered else folder / "c"
    run = Run(folder, **naming)
    run.step(1)
    run.accelerator.save_state(place)
    run.accelerator.wait_for_everyone()
    run.step(2)
    is_saved = save_unless_killed(run, place, all_ranks, operations if run.rank == victim else sys.maxsize)
    all_saved = all(gather_object([is_saved]))

    run = Run(folder, **naming)
    loaded = run.load(place)
    possible = [Loaded(weights_step=2, random_step=2)]
    if not all_saved:
        possible.append(Loaded(weights_step=1, random_step=1))
    if not all_saved and not all_ranks and run.rank == victim != 0:
        possible.append(Loaded(weights_step=2, random_step=None))  # The main process alone has saved.
    assert loaded in possible, operations
    assert len({each.weights_step for each in gather_object([loaded])}) == 1, operations
    run.step(3)
    run.accelerator.save_state(place)  # The run goes on.
    assert run.load(place) == Loaded(3, 3), operations
    return all_saved


def killed_after_each_operation(_, root: Path, *case) -> int:
    """The number of file operations after which the save comes to its end. After a failure begin with its number."""
    return next(operations for operations in itertools.count() if killed_after(root, operations, *case))


# With `numbered` the older checkpoint makes room for the new one; with `all_ranks` a save has all parts or none.
@pytest.mark.parametrize(
    ("world", "victim", "numbered", "all_ranks"),
    [
        (1, 0, True, False),
        pytest.param(1, 0, False, False, marks=pytest.mark.slow),
        pytest.param(2, 0, False, True, marks=pytest.mark.slow),
        pytest.param(2, 1, False, False, marks=pytest.mark.slow),
        pytest.param(2, 1, False, True, marks=pytest.mark.slow),
        pytest.param(2, 0, True, False, marks=pytest.mark.slow),
        pytest.param(2, 1, True, True, marks=pytest.mark.slow),
    ],
)
def test_an_interruption_at_any_file_operation_leaves_a_complete_checkpoint(
    world, victim, numbered, all_ranks, tmp_path
):
    assert on_ranks(world, killed_after_each_operation, tmp_path, victim, numbered, all_ranks)[victim] > 3


def saved_alone(_, folder: Path) -> Loaded:
    """The steps that are loaded after all ranks have saved step 0, and the main process alone step 1."""
    run = Run(folder)
    run.step(0)
    run.accelerator.save_state(folder / "c")
    run.accelerator.wait_for_everyone()
    run.step(1)
    if run.accelerator.is_main_process:
        run.accelerator.save_state(folder / "c")
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
    run.step(0)
    if run.accelerator.is_main_process:
        run.accelerator.save_state()
    run.step(1)
    run.accelerator.save_state(all_ranks=True)
    return run.load()


def test_all_save_to_one_folder_after_the_main_process_has_saved_alone(tmp_path):
    assert on_ranks(3, saved_alone_then_together, tmp_path) == [Loaded(weights_step=1, random_step=1)] * 3
    assert not list(tmp_path.glob("checkpoints/.*"))


def saved_in_a_window(_, folder: Path) -> tuple:
    """The steps, the gradient and the micro-batch that are loaded after the main process alone has saved."""
    run = Run(folder)
    accelerator = run.accelerator
    accelerator.gradient_accumulation_steps = 2
    with accelerator.accumulate(run.prepared):
        accelerator.backward(run.prepared(torch.full((1, 1), 2.0 + run.rank)).sum())

    def save_hook(models, weights, draft):
        Path(draft, "weights").write_text(str(weights.pop()["bias"].item()))

    def load_hook(models, draft):
        torch.nn.init.constant_(accelerator.unwrap_model(models.pop()).bias, float(Path(draft, "weights").read_text()))

    accelerator.register_save_state_pre_hook(save_hook)
    accelerator.register_load_state_pre_hook(load_hook)
    run.step(1)
    if accelerator.is_main_process:
        accelerator.save_state(folder / "c")
    accelerator.wait_for_everyone()
    run.step(2)
    accelerator.step = 0
    loaded = run.load(folder / "c")
    return loaded, run.model.weight.grad.item(), accelerator.step


def test_in_the_middle_of_a_window_the_others_go_on_with_the_gradients_of_the_main_process(tmp_path):
    main, other = on_ranks(2, saved_in_a_window, tmp_path)
    assert main == (Loaded(weights_step=1, random_step=1), 1.0, 1)
    assert other == (Loaded(weights_step=1, random_step=None), 1.0, 1)


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


def saved_late(_, folder: Path) -> tuple:
    """The steps and the checkpoints after four saves, each of which removes the checkpoint before.

        rank 0: save 0                  saves 1, 2 and 3
        rank 1:         save 0 begins                     save 0 ends, save 1 fails, saves 2 and 3

    The save that fails uses up a number, because the main process has saved.
    """
    run = Run(folder, automatic_checkpoint_naming=True, total_limit=1)

    def save(number: int) -> None:
        run.step(number)
        run.accelerator.save_state()

    def come_late(*_) -> None:
        tell("rank 1 has begun save 0")
        wait_until("rank 0 has made save 3")

    def fail(*_) -> None:
        raise KeyError

    if run.accelerator.is_main_process:
        save(0)
        tell("rank 0 has made save 0")
        wait_until("rank 1 has begun save 0")
        for number in (1, 2, 3):
            save(number)
        tell("rank 0 has made save 3")
    else:
        wait_until("rank 0 has made save 0")
        run.accelerator.register_save_state_pre_hook(come_late)
        save(0)
        failing = run.accelerator.register_save_state_pre_hook(fail)
        with pytest.raises(KeyError):
            save(1)
        failing.remove()
        for number in (2, 3):
            save(number)
    return run.load(), [path.name for path in (folder / "checkpoints").glob("checkpoint_*")]


def test_a_rank_that_comes_late_completes_the_checkpoint_that_is_still_there(tmp_path):
    assert on_ranks(2, saved_late, tmp_path) == [(Loaded(3, 3), ["checkpoint_3"])] * 2


def saved_early(_, folder: Path) -> None:
    """Rank 1 makes its part of "third" while rank 0 is about to remove the folder that had its part of "first".

    rank 0:                                saves "first" until …                    … removes, saves "third"
    rank 1: part of "first", fails in "second"                    part of "third"
    """
    rank = PartialState().process_index

    def written(save_id: str) -> Path:
        draft = checkpoint_folder.draft_of_this_rank(folder)
        draft.mkdir()
        (draft / f"file_{rank}").write_text(save_id)
        checkpoint_folder.complete_draft(draft, save_id, is_main_part=rank == 0)
        return draft

    if rank == 1:
        checkpoint_folder.publish_rank_part(written("first"), folder, "first")
        checkpoint_folder.remove(written("second"))
        tell("rank 1 has failed")
        wait_until("rank 0 is about to remove")
        checkpoint_folder.publish_rank_part(written("third"), folder, "third")
        tell("rank 1 has made its third part")
        return

    def remove_late(path: Path, *, rmtree=shutil.rmtree) -> None:
        tell("rank 0 is about to remove")
        wait_until("rank 1 has made its third part")
        rmtree(path)

    wait_until("rank 1 has failed")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shutil, "rmtree", remove_late)
        checkpoint_folder.publish_main_part(written("first"), folder)
    assert (folder / "file_1").read_text() == "first"
    checkpoint_folder.publish_main_part(written("third"), folder)
    assert (folder / "file_1").read_text() == "third"


def test_a_rank_that_comes_early_and_fails_in_its_second_save_loses_no_part(tmp_path):
    on_ranks(2, saved_early, tmp_path / "c")
    assert not list(tmp_path.rglob(".*"))


def saved_in_each_others_way(_, folder: Path) -> Loaded:
    """The steps that are loaded. Hooks of ranks 1 and 2 write one file, and rank 3 one where rank 0 has a folder."""
    run = Run(folder)
    name = ["note/file", "text", "text", "note"][run.rank]

    def hook(models, weights, draft):
        Path(draft, name).parent.mkdir(exist_ok=True)
        Path(draft, name).write_text(f"of rank {run.rank}")

    run.accelerator.register_save_state_pre_hook(hook)
    run.step(1)
    run.accelerator.save_state(folder / "c", all_ranks=True)
    return run.load(folder / "c")


def test_a_part_that_is_in_the_way_of_others_damages_no_checkpoint(tmp_path):
    whole = Loaded(weights_step=1, random_step=1)
    left_out = Loaded(weights_step=1, random_step=None)
    assert on_ranks(4, saved_in_each_others_way, tmp_path) == [whole, whole, whole, left_out]
