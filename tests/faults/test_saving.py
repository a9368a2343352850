"""Saving disturbs nothing. A killed run goes on from what was saved, with any number of processes."""

import contextlib
import io
import os
import pkgutil
import shutil
import signal
from pathlib import Path

import pytest

from common import ladder
from common.processes import RankFailed, ranks
from common.weights import max_weight_difference
from tests.jobs import newest_checkpoint, resumed_at
from tests.levels import EXACT, FSDP, SHORT, in_own_folder, run_level, run_on_ranks, train_until_killed

CHECKPOINTING = ladder.WITH_CHECKPOINTS
SLOW = pytest.mark.slow


def captured(level: str, argv: list[str]) -> tuple[str, dict]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        _, weights = run_level(level, argv)
    return out.getvalue(), weights


def run(level: str, processes: int, argv: list[str], environment: dict | None = None) -> tuple[str, dict]:
    return ranks(processes).run(captured, level, argv, environment=environment)[0]


@pytest.mark.parametrize(
    "level, before, step",  # Two epochs have 10 steps.
    [
        pytest.param("03_accelerate/train_full", {}, 6, marks=SLOW),
        pytest.param("04_trainer/train_full", FSDP, 7, marks=SLOW),
        *(pytest.param("03_accelerate/train_full", FSDP, step, marks=pytest.mark.long) for step in (4, 6, 10)),
    ],
)
def test_killed_on_two_processes_it_goes_on_with_any_number(level, before, step, tmp_path):
    training = [*EXACT, "--train-samples", "62"]
    saving = [*training, "--checkpoint-every", "2", "--checkpoint-dir"]
    _, expected = run_on_ranks(level, 2, training, environment=before)
    with pytest.raises(RankFailed):
        ranks(2).run(train_until_killed, step, level, [*saving, str(tmp_path / "killed")], environment=before)
    for number, (processes, environment) in enumerate([(2, FSDP), (3, FSDP), (2, {}), (1, {}), (4, {})]):
        folder = shutil.copytree(tmp_path / "killed", tmp_path / str(number))
        printed, weights = run(level, processes, [*saving, str(folder)], environment)
        assert resumed_at(printed) == [(step - 1) // 2 * 2], printed
        assert max_weight_difference(weights, expected) <= (0.0 if processes == 2 else 1e-9), (processes, environment)


def train_until_killed_in(call: str, level: str, argv: list[str], folder: Path) -> None:
    """Train, and kill this process in the save that follows checkpoint 2, where it calls the function `call`."""
    function = pkgutil.resolve_name(call)

    def kill_or_call(*args, **kwargs):
        if newest_checkpoint(folder) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    pytest.MonkeyPatch().setattr(call, kill_or_call)
    run_level(level, argv)


@SLOW
@pytest.mark.parametrize("level", CHECKPOINTING)
@pytest.mark.parametrize("call", ["torch.save", "os.rename"])
def test_killed_while_it_saves_it_goes_on_from_the_checkpoint_before(call, level, tmp_path):
    """The kill comes when the weights are written, or when all files are, but still in the hidden folder."""
    training = [*SHORT, "--epochs", "2"]  # These are four steps.
    saving = [*training, "--checkpoint-every", "1", "--checkpoint-dir", str(tmp_path)]
    _, expected = run(level, 1, training)
    with pytest.raises(RankFailed):
        ranks(1).run(train_until_killed_in, call, level, saving, tmp_path)
    (unfinished,) = tmp_path.rglob(".checkpoint?3.draft_0")
    written = {path.name for path in unfinished.iterdir()}
    assert "model.safetensors" in written and ("manifest.json" in written) is (call == "os.rename")
    printed, weights = run(level, 1, saving)
    assert resumed_at(printed) == [2]
    assert max_weight_difference(weights, expected) == 0


@SLOW
@pytest.mark.parametrize("level", CHECKPOINTING)
def test_rank_0_looks_for_the_checkpoint(level, tmp_path):
    """If only another rank sees one, all begin anew. Some would else wait for the others in a collective."""
    argv = [*SHORT, "--checkpoint-every", "1", "--checkpoint-dir", "run"]
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    ranks(2).run(in_own_folder, folders, captured, level, argv)
    assert [any(folder.rglob("manifest.json")) for folder in folders] == [True, False]
    argv = [*argv, "--epochs", "2"]
    (printed, _), _ = ranks(2).run(in_own_folder, folders[::-1], captured, level, argv, timeout=60)
    assert resumed_at(printed) == [] and "4 steps" in printed
