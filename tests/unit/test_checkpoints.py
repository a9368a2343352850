"""The steps at which all ranks of a long training save: every so often, at its end, and when one gets a signal."""

import os
import shutil
import signal
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from tqdm import tqdm

from common import ladder
from common.args import parse_args
from common.checkpoints.schedule import CheckpointInterval, CheckpointSchedule
from common.checkpoints.signals import caught_signals, stop_run
from common.errors import UserError
from common.process_group import process_group
from common.processes import ranks
from common.settings import fit_to_machine
from tests.levels import signal_before_step

CPU = torch.device("cpu")


def saving_steps(interval: CheckpointInterval, signal_at: int, ticking_rank: int) -> list[tuple]:
    """The steps of 40 at which a rank saves, and whether it stops. Rank 1 gets a signal at step `signal_at`.

    A step takes a second by the clock of rank `ticking_rank`; that of the other rank stands.
    """
    with process_group(), pytest.MonkeyPatch.context() as patch:
        now = [0.0]
        patch.setattr("common.checkpoints.schedule.time", SimpleNamespace(monotonic=lambda: now[0]))
        signals = []
        schedule = CheckpointSchedule(interval, 40, signals, CPU)
        saved = []
        for step in range(1, 41):
            if os.environ["RANK"] == str(ticking_rank):
                now[0] += 1
            if os.environ["RANK"] == "1" and step == signal_at:
                signals.append(signal.SIGINT)
            decision = schedule.decide(step)
            if decision.save:
                saved.append((step, decision.stop))
            if decision.stop:
                break
        return saved


@pytest.mark.parametrize(
    "interval, signal_at, ticking_rank, saved",
    [
        (CheckpointInterval(steps=15), 100, 0, [(15, False), (30, False), (40, False)]),
        (CheckpointInterval(steps=15), 17, 0, [(15, False), (20, True)]),
        (CheckpointInterval(seconds=11), 100, 0, [(20, False), (40, False)]),
        (CheckpointInterval(seconds=11), 100, 1, [(20, False), (40, False)]),
        (CheckpointInterval(), 100, 0, [(40, False)]),
    ],
)
def test_all_ranks_save_at_the_same_steps(interval, signal_at, ticking_rank, saved):
    assert ranks(2).run(saving_steps, interval, signal_at, ticking_rank) == [saved, saved]


@pytest.mark.parametrize("is_under_torchrun", [False, True])
def test_the_second_ctrl_c_ends_the_process(is_under_torchrun, monkeypatch):
    """torchrun hands Ctrl-C on to ranks that have got it from the terminal already."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if is_under_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    first = [signal.SIGTERM, signal.SIGTERM, signal.SIGINT]
    if is_under_torchrun:
        first.append(signal.SIGINT)
    with caught_signals() as signals:
        for number in first:
            assert signal.getsignal(number) not in (signal.SIG_DFL, *before)
            signal.raise_signal(number)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signals == first
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.parametrize("signals, code", [([signal.SIGINT], 130), ([], 143)])
def test_the_exit_code_is_that_of_the_signal_or_of_another_ranks_sigterm(signals, code):
    with pytest.raises(SystemExit) as ended:
        stop_run(7, signals)
    assert ended.value.code == code


SMALL = ["--dataset", "synthetic", "--train-samples", "64", "--eval-samples", "32", "--batch-size", "32"]


def train(level: str, *flags: str) -> dict:
    module = ladder.load(level)
    return module.train(fit_to_machine(parse_args(module.__file__, [*SMALL, *flags])))


@pytest.mark.parametrize("level", ladder.WITH_CHECKPOINTS)
def test_only_the_same_training_goes_on_from_a_checkpoint(level, tmp_path, monkeypatch, capsys):
    flags = ["--checkpoint-dir", str(tmp_path), "--epochs", "2"]
    bar = mock.Mock(wraps=tqdm)
    monkeypatch.setattr(sys.modules["common.instruments.measured"], "tqdm", bar)
    first = train(level, *flags)
    capsys.readouterr()
    again = train(level, *flags)
    assert [call.kwargs["total"] for call in bar.call_args_list] == [4, None]
    assert "| no step so far in this run | 4 steps in " in capsys.readouterr().out.splitlines()[-1]
    for name in ("steps", "loss", "eval_loss", "accuracy"):
        assert again[name] == pytest.approx(first[name], abs=1e-7), name
    for change, line in (
        (["--batch-size", "16"], "--batch-size 16: the checkpoint is of a training with 32"),
        (["--seed", "7"], "--seed 7: the checkpoint is of a training with 42"),
        (["--train-samples", "96"], "training samples 96: the checkpoint is of a training with 64"),
        (["--epochs", "1"], "--epochs 1: the checkpoint is of a longer training, in its epoch 2"),
    ):
        with pytest.raises(UserError, match=line):
            train(level, *flags, *change)


@pytest.mark.parametrize("level", ladder.WITH_CHECKPOINTS)
def test_a_resumed_run_may_accumulate_over_another_number_of_micro_batches(level, tmp_path):
    flags = ["--checkpoint-dir", str(tmp_path), "--train-samples", "192", "--checkpoint-every", "3"]
    for micro_batches in ("2", "4"):
        result = train(level, *flags, "--gradient-accumulation-steps", micro_batches)
        (newest,) = tmp_path.glob("**/checkpoint?6")
        shutil.rmtree(newest)
        assert result["steps"] == 6


@pytest.mark.parametrize("level", ladder.WITH_CHECKPOINTS)
def test_no_checkpoint_is_made_of_a_training_that_is_not_finite(level, tmp_path):
    with pytest.raises(UserError, match=r"not finite.* at step 3: no checkpoint is made"):
        train(level, "--train-samples", "96", "--lr", "1e30", "--checkpoint-dir", str(tmp_path))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("level", ladder.WITH_CHECKPOINTS)
def test_a_signal_ends_a_training_before_the_end_of_its_epoch_is_reported(level, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("common.checkpoints.schedule.STEPS_BETWEEN_VOTES", 1)
    flags = ["--train-samples", "128", "--epochs", "2", "--checkpoint-dir", str(tmp_path)]
    with pytest.raises(SystemExit) as ended, signal_before_step(3, signal.SIGTERM):
        train(level, *flags)
    assert ended.value.code == 128 + signal.SIGTERM
    printed = capsys.readouterr().out
    assert "stopped at step 3: run it again to continue\n" in printed and "eval_loss" not in printed
    assert len(list(tmp_path.rglob("manifest.json"))) == 1
    assert train(level, *flags)["steps"] == 8
