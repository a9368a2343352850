"""Networks: their weights, optimizers, clipping, random numbers and files."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from common.doctor.checks import clipping, files, optimizers, weights
from common.doctor.checks.loaders import LoaderObserver
from common.doctor.checks.networks import NetworkObserver
from common.doctor.checks.random_numbers import check_draws, note_draws
from common.doctor.record import Network, Record, Save, Step
from common.doctor.results import Finding, Passed, Skipped
from tests.unit.doctor.records import epoch_of

APART = [torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0])]  # the weights of rank 0 and of rank 1
EQUAL = [torch.tensor([3.0, 3.0])] * 2


def two_ranks() -> list[Record]:
    return [Record(rank, steps=[Step([0.1], 1)] * 8, networks=[Network(forwards=1)]) for rank in range(2)]


def verdict(*by_step, wrapped=False, rates_of_rank_1=(0.1,) * 8, exchanged_after=()) -> type:
    """The kind of result where two ranks have such weights after the first, the second, … of eight steps."""
    records = two_ranks()
    records[0].networks[0].wrapped = wrapped
    records[0].networks[0].trained_numbers = 2
    records[0].exchanged.update(dict.fromkeys(exchanged_after, 2))
    records[1].steps = [Step([rate], 1) for rate in rates_of_rank_1]
    for step, of_ranks in enumerate(by_step, start=1):
        for one, tensor in zip(records, of_ranks, strict=True):
            one.networks[0].weights[step] = {"w": tensor}
    return type(weights.check_same_weights(records))


def test_weights_differ_by_mistake_or_for_a_reason():
    assert verdict(APART, EQUAL, APART) is Skipped  # maybe averaged
    assert verdict(EQUAL, APART, APART) is Finding
    assert verdict(APART, APART, exchanged_after=[8]) is Skipped  # maybe averaged after the last step
    assert verdict(APART, wrapped=True, rates_of_rank_1=[0.2] * 8) is Skipped
    assert verdict(APART, wrapped=True, rates_of_rank_1=[0.1] * 9) is Finding  # it makes a step alone
    assert verdict(APART, rates_of_rank_1=[0.2] * 8, exchanged_after=range(5)) is Skipped  # maybe gradients
    assert verdict(APART, rates_of_rank_1=[0.2] * 8, exchanged_after=range(4)) is Finding  # too seldom for them


@pytest.mark.parametrize("different_step, kind", [(4, Finding), (5, Skipped)])
def test_steps_are_compared_up_to_the_last_batch_of_the_rank_that_has_fewer(different_step, kind):
    records = two_ranks()
    records[0].epochs = [epoch_of(range(24))]
    records[1].epochs = [epoch_of(range(20))]
    records[1].steps[different_step - 1] = Step([0.2], 1)
    for one in records:
        one.networks[0].statistics[different_step] = {"mean": APART[one.rank]}
    assert isinstance(optimizers.check_learning_rates(records), kind)
    assert isinstance(weights.check_same_statistics(records), kind)


def test_what_backward_computes_again_is_no_further_forward(monkeypatch):
    recorder = SimpleNamespace(record=Record(rank=0))
    observer = NetworkObserver(recorder, SimpleNamespace(batch_in_use=lambda: None))
    before = register_module_forward_pre_hook(observer.before_forward)
    after = register_module_forward_hook(observer.after_forward, with_kwargs=True)
    module = nn.Linear(2, 1)
    checkpoint(module, torch.ones(3, 2), use_reentrant=False).sum().backward()
    assert [(network.shapes["weight"], network.forwards) for network in recorder.record.networks] == [((1, 2), 1)]
    recorder.record.exchanged.update({99: 2, 100: 3})  # the numbers of one weight, and of all
    for _ in range(100):  # the weights are noted after each of the first 64, and where they may be averaged
        recorder.record.steps.append(Step([0.1], 1))
        module(torch.ones(3, 2))
    recorder.record.steps *= 2
    module.eval()(torch.ones(3, 2))  # as rank 0 alone may do with averaged weights
    before.remove()
    after.remove()
    assert list(recorder.record.networks[0].weights) == [*range(1, 65), 100]
    sharded = nn.ModuleDict({"_fsdp_wrapped_module": module})
    assert weights.some_weights(sharded) == weights.some_weights(nn.LazyLinear(1)) == {}
    with pytest.raises(RuntimeError):  # here, and not where the record is written
        torch.func.vmap(weights.some_numbers)(torch.ones(2, 3))
    assert len(weights.some_numbers(torch.arange(512).repeat(512)).unique()) > 30  # of all columns
    monkeypatch.setattr("common.doctor.checks.networks.states", lambda device: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        observer.before_forward(module.train(), ())
    assert observer._forward is not None  # else the parts of a network would count as networks


def test_what_a_sampler_draws_is_no_augmentation(recorder, monkeypatch):
    monkeypatch.setattr("numpy.random.get_state", lambda legacy: {"state": {"inc": 1}})  # as of `set_bit_generator`
    LoaderObserver(recorder).install()
    recorder.record.steps.append(Step([0.1], 1))
    for augment, noted in ((False, 0), (True, 2)):
        data = [torch.ones(1)] * 9
        sampler = (torch.randint(9, (4,)).tolist() for _ in range(3))
        list(DataLoader(data, batch_sampler=sampler, collate_fn=lambda rows, noisy=augment: noisy and torch.rand(2)))
        assert sum(map(len, recorder.record.draws.values())) == noted


def test_the_first_draws_of_each_source_are_recorded():
    record = Record(0, steps=[Step([0.1], 1)])
    for source in ["batches"] * 100 + ["forwards in training"]:
        note_draws(record, source, {"torch": 1}, torch.device("cpu"))
    assert [len(states) for states in record.draws.values()] == [64, 1]


@pytest.mark.parametrize("of_ranks, kind", [((1, 2, 2), Finding), ((1, 1, 2), Finding), ((1, 2, 3), Passed)])
def test_no_two_ranks_draw_alike(of_ranks, kind):
    networks = [Network(forwards=1)]
    records = [Record(0, draws={("batches", "torch"): [state]}, networks=networks) for state in of_ranks]
    assert isinstance(check_draws(records), kind)
    records[0].networks = [Network(forwards=1, shapes={"of another stage": (1,)})]
    assert isinstance(check_draws(records), Skipped)


@pytest.mark.parametrize("micro_batches, kind", [([1, 0, 3, 0, 3], Finding), ([3, 3, 3], Passed), ([1, 3], Skipped)])
def test_the_first_window_of_accumulation_is_as_long_as_the_next(micro_batches, kind):
    steps = [Step([0.1], count) for count in micro_batches]
    first = Record(0, steps=steps, networks=[Network(forwards=12)])
    assert isinstance(optimizers.check_accumulation([first]), kind)
    first.networks.append(Network(forwards=12))
    assert optimizers.check_accumulation([first]).reason.endswith("but 2 were trained")


@pytest.mark.parametrize("rates, kind", [([0.2, 0.1, 0], Passed), ([0.1, 0, 0, 0], Finding), ([0, None], Passed)])
def test_a_schedule_lasts_as_long_as_the_training(rates, kind):
    of_another = [Step([0.5, 0.5], 1, optimizer=1)] * 3  # which stays as it is
    of_one = [Step([rate], 1) for rate in rates]
    assert isinstance(optimizers.check_schedule([Record(0, steps=of_one + of_another)]), kind)


def test_the_optimizer_in_a_zero_redundancy_optimizer_is_followed_to_the_last_step(recorder, monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    observer = optimizers.OptimizerObserver(recorder, {}, last_step=3)
    inner, outer = (torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1) for _ in range(2))
    inner.param_groups[0]["lr"] = None  # as Adafactor has it
    outer.optim = inner
    for optimizer in [inner, outer] * 3:
        observer.after_step(optimizer, (), {})
    assert (len(recorder.record.steps), recorder.record.end.reason, ended) == (3, "steps", [0])


@pytest.mark.parametrize(
    "calls, enabled, kind",
    [
        pytest.param("scale unscale_ clip step", True, Passed, id="divided before"),
        pytest.param("scale clip step", True, Finding, id="not divided"),
        pytest.param("scale step update scale clip", True, Finding, id="not divided after a step"),
        pytest.param("scale_sharded clip", True, Finding, id="not divided by the scaler of FSDP"),
        pytest.param("scale clip step", False, Passed, id="never multiplied"),
        pytest.param("scale unscale_ scale_of_other clip", True, Passed, id="another scaler multiplies last"),
    ],
)
def test_gradients_are_clipped_at_their_own_scale(calls, enabled, kind, recorder):
    clipping.ClippingObserver(recorder).install()
    scaler, other = (torch.amp.GradScaler("cpu", 65536.0, 2.0, 0.5, 2000, enabled) for _ in range(2))
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    do = {
        "scale": lambda: scaler.scale(weight.sum()).backward(),
        "scale_sharded": lambda: ShardedGradScaler("cpu").scale(weight.sum()).backward(),
        "scale_of_other": lambda: other.scale(torch.ones(1)),
        "unscale_": lambda: scaler.unscale_(optimizer),
        "clip": lambda: nn.utils.clip_grad_norm_([weight], 1.0),
        "step": lambda: scaler.step(optimizer),
        "update": scaler.update,
    }
    for call in calls.split():
        do[call]()
    assert isinstance(clipping.check_clipping([recorder.record]), kind)


def test_files_of_one_name_in_two_folders_are_two(recorder, tmp_path):
    files.observe_saves(recorder)
    paths = [tmp_path / folder / "last.pt" for folder in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        torch.save({"model": {"w": torch.ones(1), "_extra_state": b""}}, path)
    torch.save({}, os.devnull)
    assert [(save.path, save.state_dicts) for save in recorder.record.saves] == [(str(path), [["w"]]) for path in paths]


@pytest.mark.parametrize(
    "keys, kind",
    [
        (["_orig_mod.module.w", "_orig_mod.module.buffer"], Finding),
        (["module.of_another"], Passed),
        (["n_averaged", "module.w"], Passed),
        (["n_averaged", "module.module.w"], Finding),
    ],
)
def test_the_keys_of_a_wrapped_network_may_not_have_the_prefix(keys, kind):
    networks = [Network(wrapped=True, shapes={"w": (1,)}), Network(shapes={"of_another": (1,)})]
    assert isinstance(files.check_keys([Record(0, saves=[Save("last.pt", [keys])], networks=networks)]), kind)
