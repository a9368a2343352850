"""Tensor and pipeline parallelism: level 00's weights, and the messages that were counted."""

import math
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler

from common import ladder
from common.args import parse_args
from common.data import collate, load_data
from common.model import BasicNet, build_model
from common.process_group import process_group
from common.processes import ranks
from common.settings import fit_to_machine
from common.small.pipeline import Stage, layers_of
from common.small.schedules import all_forward_first, one_forward_one_backward, timeline
from common.small.tensor_parallel import cut_linear_layers
from common.weights import max_weight_difference
from tests.levels import EXACT, level_00

SCHEDULES = [all_forward_first, one_forward_one_backward]
BATCH = 96
CUT = {"fc1.weight": 0, "fc1.bias": 0, "fc2.weight": 1}  # the dimension in which a parameter is cut


def train(cut) -> dict[str, torch.Tensor]:
    """This rank's weights after level 00's exact training. `cut(model)` returns a module to optimize and a step."""
    args = fit_to_machine(parse_args(str(ladder.script("02_ddp_raw")), EXACT))
    train_set, _ = load_data(args)
    sampler = RandomSampler(train_set, generator=torch.Generator())
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True, collate_fn=collate)
    model = build_model(args)
    with process_group():
        module, backward = cut(model)
        optimizer = torch.optim.AdamW(module.parameters(), lr=args.lr)
        for epoch in range(args.epochs):
            sampler.generator.manual_seed(args.seed + epoch)
            for images, targets in loader:
                backward(images, targets)
                optimizer.step()
                optimizer.zero_grad()
        trained = {id(parameter) for parameter in module.parameters()}
        return {name: weight.detach() for name, weight in model.named_parameters() if id(weight) in trained}


def cut_in_tensors(model: BasicNet):
    cut_linear_layers(model)
    return model, lambda images, targets: F.nll_loss(model(images), targets).backward()


def cut_in_stages(schedule, micro_batches: int, model: BasicNet):
    sample = torch.zeros(1, 1, 28, 28, dtype=model.fc1.weight.dtype)
    stage = Stage(layers_of(model), sample)
    return stage.module, lambda images, targets: stage.step(images, targets, micro_batches, schedule)


WORLDS = [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))]


@pytest.mark.parametrize("world_size", [*WORLDS, pytest.param(1, marks=pytest.mark.slow)])
def test_cut_layers_train_the_weights_of_level_00(world_size):
    of_ranks = ranks(world_size).run(train, cut_in_tensors)
    expected = level_00().weights
    for name, weight in expected.items():
        parts = [weights[name] for weights in of_ranks]
        if name in CUT:
            largest = math.ceil(weight.shape[CUT[name]] / world_size)
            assert all(part.shape[CUT[name]] <= largest for part in parts), name
            whole = torch.cat(parts, CUT[name])
        else:
            assert all(torch.equal(part, parts[0]) for part in parts), name
            whole = parts[0]
        assert max_weight_difference({name: whole}, {name: weight}) <= 1e-9


@pytest.mark.parametrize(
    "micro_batches, schedule",  # five are uneven; of one there is only one schedule
    [(1, all_forward_first), (5, all_forward_first), (5, one_forward_one_backward)],
)
@pytest.mark.parametrize("world_size", WORLDS)
def test_stages_train_the_weights_of_level_00(world_size, micro_batches, schedule):
    of_ranks = ranks(world_size).run(train, partial(cut_in_stages, schedule, micro_batches))
    of_all_ranks = {}
    for weights in of_ranks:
        assert not weights.keys() & of_all_ranks.keys(), "nobody has what another one has"
        of_all_ranks |= weights
    assert max_weight_difference(of_all_ranks, level_00().weights) <= 1e-9


def gradients_of_frozen_layers(cut) -> list[torch.Tensor | None]:
    """The gradients of this rank's parts of BasicNet, whose first three layers are frozen."""
    torch.manual_seed(0)
    model = BasicNet(dropout=False)
    for layer in (model.conv1, model.conv2, model.fc1):
        layer.requires_grad_(False)
    with process_group():
        module, backward = cut(model)
        backward(torch.randn(4, 1, 28, 28, generator=torch.Generator().manual_seed(1)), torch.arange(4))
        return [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("cut", [cut_in_tensors, partial(cut_in_stages, one_forward_one_backward, 2)])
def test_frozen_layers_stay_frozen_and_the_last_one_is_trained(cut):
    (whole,) = ranks(1).run(gradients_of_frozen_layers, cut)
    weight, bias = whole[-2:]
    first, second = ranks(2).run(gradients_of_frozen_layers, cut)
    part, own_bias = second[-2:]
    assert all(gradient is None for gradient in first[:5])
    assert torch.allclose(part, weight[:, -part.shape[1] :], atol=1e-6) and torch.allclose(own_bias, bias, atol=1e-6)


def cut_what_cannot_be_cut() -> None:
    with process_group():
        with pytest.raises(ValueError, match="1 layers cannot be shared out among 2 ranks"):
            Stage([torch.nn.Sequential()], torch.zeros(1))
        model = BasicNet()
        cut_linear_layers(model)
        with pytest.raises(ValueError, match="are cut already"):
            cut_linear_layers(model)


def test_too_few_layers_and_layers_that_are_cut_already_are_refused_on_all_ranks():
    ranks(2).run(cut_what_cannot_be_cut)


def make_a_stage_behind_dropout_and_batch_norm() -> None:
    norm = torch.nn.BatchNorm2d(1)
    layers = [torch.nn.Sequential(norm, torch.nn.Dropout()), torch.nn.Sequential(torch.nn.ReLU())]
    before = torch.get_rng_state()
    with process_group():
        Stage(layers, torch.ones(1, 1, 2, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert norm.num_batches_tracked == 0


def test_making_a_stage_draws_no_random_numbers_and_changes_no_statistics():
    ranks(2).run(make_a_stage_behind_dropout_and_batch_norm)


IMAGES = torch.ones(BATCH, 1, 28, 28)
TARGETS = torch.zeros(BATCH, dtype=torch.long)


def count_messages(cut) -> dict[str, list[tuple]]:
    """The shapes of what this rank sends in a step, by the function that it calls."""
    with process_group():
        _, backward = cut(BasicNet(dropout=False))
        with (
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce,
            mock.patch.object(dist, "isend", wraps=dist.isend) as isend,
        ):
            backward(IMAGES, TARGETS)
    return {
        "all_reduce": [tuple(call.args[0].shape) for call in all_reduce.call_args_list],
        "isend": [tuple(call.args[0].shape) for call in isend.call_args_list],
    }


def test_a_step_of_cut_layers_sums_the_outputs_and_the_gradient_of_the_inputs():
    for messages in ranks(2).run(count_messages, cut_in_tensors):
        assert messages == {"all_reduce": [(BATCH, 10), (BATCH, 9216)], "isend": []}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_sends_each_micro_batch_once_in_each_direction(schedule):
    micro_batches = [(BATCH // 4, 64, 12, 12)] * 4
    for messages in ranks(2).run(count_messages, partial(cut_in_stages, schedule, 4)):
        assert messages == {"all_reduce": [], "isend": micro_batches}


def backward_first_on_rank_0(rank, world_size, micro_batches):
    """A schedule in which rank 0 waits for the backward of rank 1, and rank 1 for the forward of rank 0."""
    actions = all_forward_first(rank, world_size, micro_batches)
    return sorted(actions) if rank == 0 else actions


def test_a_schedule_that_never_ends_is_refused():
    with pytest.raises(ValueError, match=r"ranks \[0, 1\] wait for messages that never come"):
        timeline(backward_first_on_rank_0, 2, 3)


@given(world_size=st.integers(1, 6), micro_batches=st.integers(1, 12), schedule=st.sampled_from(SCHEDULES))
def test_a_timeline_has_every_action_once_and_the_known_bubble(world_size, micro_batches, schedule):
    drawn = timeline(schedule, world_size, micro_batches)
    for rank, slots in enumerate(drawn.slots):
        actions = schedule(rank, world_size, micro_batches)
        assert sorted(set(actions)) == sorted(actions) and len(actions) == 2 * micro_batches
        assert [slots.count(action) for action in actions] == [1 if a.kind == "forward" else 2 for a in actions]
        assert slots.count(None) / len(slots) == pytest.approx(drawn.bubble)
    assert drawn.bubble == pytest.approx((world_size - 1) / (micro_batches + world_size - 1))
    fewest = [min(world_size - rank, micro_batches) for rank in range(world_size)]
    assert drawn.kept == (fewest if schedule is one_forward_one_backward else [micro_batches] * world_size)


def test_the_page_has_the_timelines_that_the_code_draws():
    page = (ladder.ROOT / "common/small/MODEL_PARALLEL.md").read_text()
    shown = [line.strip() for line in page.splitlines() if line.startswith("    rank ")]
    assert shown == [line for schedule in SCHEDULES for line in str(timeline(schedule, 4, 4)).splitlines()]
