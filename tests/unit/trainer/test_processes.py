"""The same training on several processes: same weights, same logs, same decisions, exact resumption."""

import contextlib
import io
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from common.launch import read_launch
from common.processes import ranks
from common.trainer import Trainer, get_last_checkpoint
from tests.bits import without_timings
from tests.states import on_a_rank
from tests.toys import Points, seeded_net
from tests.unit.trainer.toy import At, accuracy, make_trainer, save_and_stop, weights

# 100 = 8 · 12 + 4: 12 divides by 1, 2 and 3 processes times 1 and 2 micro-batches.
GLOBAL_BATCH = 12


class Outcome(NamedTuple):
    weights: list[float]
    log_history: list[dict]
    next_random_number: float


def outcome(trainer) -> Outcome:
    log_history = [without_timings(logs) for logs in trainer.state.log_history]
    return Outcome(weights(trainer).tolist(), log_history, torch.rand(()).item())


@on_a_rank
def run(folder, *, accumulation=1, resume=None, stop_at=(), dropout=0.0, **arguments):
    world_size = read_launch().world_size
    settings = {
        "gradient_accumulation_steps": accumulation,
        "per_device_train_batch_size": GLOBAL_BATCH // accumulation // world_size,
        "dataloader_drop_last": True,
        "num_train_epochs": 2,
        # The last of 16 steps is logged too: `train_loss` takes what was not logged from its own rank.
        "logging_steps": 4,
        "eval_strategy": "epoch",
    }
    extra = {
        "train_dataset": Points(100, torch.float64),
        # No sample of the evaluation has to be repeated on 1, 2 or 3 processes with batches of 8.
        "eval_dataset": Points(48, torch.float64),
        "compute_metrics": accuracy,
    }
    model = seeded_net(dtype=torch.float64, dropout=dropout)
    trainer = make_trainer(folder, model=model, extra=extra, **(settings | arguments))
    if stop_at:
        trainer.add_callback(At(*stop_at))
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer)


def assert_same(outcomes, expected) -> None:
    for got in outcomes:
        assert got.weights == pytest.approx(expected.weights, abs=1e-12, rel=0)
        for entry, other in zip(got.log_history, expected.log_history, strict=True):
            # Losses are added up in float32, whatever the model computes in.
            assert entry == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize(("world_size", "accumulation"), [(2, 1), (3, 2)])
def test_processes_and_accumulation_do_not_change_the_training(world_size, accumulation, tmp_path):
    outcomes = ranks(world_size).run(run, tmp_path, accumulation=accumulation)
    assert_same(outcomes, run(tmp_path))
    assert len({got.next_random_number for got in outcomes}) == 1  # all ranks have the same seed


def test_a_model_that_is_shared_out_trains_to_the_same_bits_and_goes_on_under_ddp(tmp_path):
    fsdp = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}}
    fsdp["fsdp_config"]["min_num_params"] = 20
    saving = {"save_strategy": "epoch", "load_best_model_at_end": True, "max_grad_norm": 0}
    straight = ranks(2).run(run, tmp_path / "straight", accumulation=2, **saving)
    shared_out = ranks(2).run(run, tmp_path / "shared", accumulation=2, **saving, **fsdp)
    first = str(tmp_path / "shared" / "checkpoint-8")
    resumed = ranks(2).run(run, tmp_path / "resumed", accumulation=2, resume=first, **saving)
    for expected, *others in zip(straight, shared_out, resumed, strict=True):
        assert all(other.weights == expected.weights for other in others)
    assert shared_out[0].log_history[-1] == pytest.approx(straight[0].log_history[-1])


def test_two_processes_that_were_stopped_within_a_step_train_it_again_together(tmp_path):
    """Every optimizer step must follow an exchange of gradients, or each rank goes its own way."""
    never = {"save_strategy": "no", "eval_strategy": "no"}
    straight = ranks(2).run(run, tmp_path / "straight", accumulation=2, **never)
    stopped = tmp_path / "stopped"
    ranks(2).run(run, stopped, accumulation=2, stop_at=("on_substep_end", 4, save_and_stop), **never)
    resumed = ranks(2).run(run, stopped, accumulation=2, resume=str(stopped / "checkpoint-3"), **never)
    assert resumed[0].weights == resumed[1].weights
    assert resumed == straight


def test_two_processes_pass_over_a_damaged_checkpoint_alike(tmp_path):
    """They go on from the one before it, of step 5, which is in the middle of an epoch."""
    saving = {"save_strategy": "steps", "save_steps": 5, "dropout": 0.3, "max_steps": 14}
    straight = ranks(2).run(run, tmp_path / "straight", accumulation=2, **saving)
    ranks(2).run(run, tmp_path / "killed", accumulation=2, stop_at=("on_step_end", 10, save_and_stop), **saving)
    (tmp_path / "killed" / "checkpoint-10" / "random_states_1.pkl").unlink()
    resumed = ranks(2).run(run, tmp_path / "killed", accumulation=2, resume=True, **saving)
    assert resumed == straight
    assert len(list((tmp_path / "killed").glob("checkpoint-10.damaged-*"))) == 1


def test_another_number_of_processes_goes_on_in_the_same_order(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 5, "eval_strategy": "no"}
    expected = run(tmp_path / "straight", **saving)
    run(tmp_path, stop_at=("on_step_end", 10, save_and_stop), **saving)
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")
    assert_same(ranks(3).run(run, tmp_path, resume=str(tmp_path / "checkpoint-10"), **saving), expected)


@on_a_rank
def report_on_rank(folder):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        split = {"accelerator_config": {"split_batches": True}}
        trainer = make_trainer(folder, evaluate=9, eval_strategy="epoch", logging_steps=2, **split)
        trainer.train()
    [speeds] = [entry for entry in trainer.state.log_history if "eval_steps_per_second" in entry]
    # 9 samples are two batches of all ranks, which have 8 together.
    assert speeds["eval_samples_per_second"] / speeds["eval_steps_per_second"] == pytest.approx(4.5, rel=1e-2)
    return out.getvalue()


def test_only_rank_0_speaks(tmp_path):
    first, second = ranks(2).run(report_on_rank, tmp_path)
    assert "Running training: 40 examples, steps 0 to 5 of 8 each" in first and "eval_loss" in first
    assert second == ""


class NotesSaves(Trainer):
    saves = 0

    def _save(self, output_dir=None, state_dict=None):
        self.saves += 1
        super()._save(output_dir, state_dict)
        if self.is_in_train:
            self.accelerator.wait_for_everyone()


@on_a_rank
def count_saves(folder) -> int:
    trainer = make_trainer(folder, train=16, trainer_class=NotesSaves, save_strategy="epoch")
    trainer.train()
    if trainer.is_world_process_zero():
        trainer.save_model()
    return trainer.saves


def test_all_processes_call_an_override_of_save_and_the_main_process_may_save_the_model_alone(tmp_path):
    assert ranks(2).run(count_saves, tmp_path, timeout=60) == [2, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "model.safetensors"]


@on_a_rank
def evaluate_then_train(folder) -> torch.Tensor:
    trainer = make_trainer(folder, train=48, evaluate=9, bf16=True)
    trainer.evaluate()
    trainer.train()
    return weights(trainer)


def test_ranks_train_together_after_an_evaluation(tmp_path):
    first, second = ranks(2).run(evaluate_then_train, tmp_path)
    assert torch.equal(first, second)


RETURNED = {
    "whole": lambda rank: DataLoader(Points(48), 4, shuffle=True),
    "without a size": lambda rank: DataLoader(Points(48), batch_sampler=torch.randperm(48).view(12, 4).tolist()),
    "dealt out": lambda rank: DataLoader(Points(48), 4, sampler=DistributedSampler(Points(48), 2, rank)),
}


@on_a_rank
def samples_seen(folder, name) -> list[torch.Tensor]:
    """The samples that this rank sees in each of two epochs, by their first numbers."""
    trainer = make_trainer(folder, num_train_epochs=2)
    trainer.get_train_dataloader = lambda: RETURNED[name](trainer.accelerator.process_index)
    seen = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["x"][:, 0]), with_kwargs=True
    )
    trainer.train()
    return torch.cat(seen).chunk(2)


@pytest.mark.parametrize("name", RETURNED)
def test_the_loader_of_an_override_is_dealt_out(name, tmp_path):
    expected = Points(48).x[:, 0].sort().values
    for epoch in zip(*ranks(2).run(samples_seen, tmp_path, name), strict=True):
        assert torch.equal(torch.cat(epoch).sort().values, expected)


@on_a_rank
def offsets_of_inputs(folder) -> list[int]:
    """The addresses at which inputs began, in bytes after a multiple of 64."""
    points = Points(12)
    points.x = points.x[:, :6]  # rows of 24 bytes, so that the second half of a batch seldom begins at such a multiple
    model = seeded_net()
    model.linear = torch.nn.Linear(6, 10)
    offsets = []
    model.linear.register_forward_pre_hook(lambda module, inputs: offsets.append(inputs[0].data_ptr() % 64))
    settings = {"per_device_train_batch_size": 3, "per_device_eval_batch_size": 3, "eval_strategy": "epoch"}
    extra = {"train_dataset": points, "eval_dataset": points}
    make_trainer(folder, model=model, extra=extra, accelerator_config={"dispatch_batches": True}, **settings).train()
    return offsets


def test_the_inputs_of_each_rank_begin_where_those_of_transformers_do(tmp_path):
    """A product over rows that begin elsewhere may take another path, and then ends with other bits."""
    assert ranks(2).run(offsets_of_inputs, tmp_path) == [[0] * 4, [0] * 4]
