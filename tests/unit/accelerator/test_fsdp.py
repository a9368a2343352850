"""FSDP: each rank has its part of the model, and the training ends with the bits of DDP."""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from common.accelerator import Accelerator
from common.accelerator.remote_errors import RemoteError
from common.accelerator.state import DistributedType, PartialState
from common.accelerator.utils import FullyShardedDataParallelPlugin, ProjectConfiguration
from common.processes import RankFailed
from common.weights import max_weight_difference
from tests.unit.accelerator.several_processes import on_ranks

SIZED = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 20}
LAYERS = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": "Layer"}
plugin = partial(FullyShardedDataParallelPlugin, fsdp_version=2)


class Layer(nn.Linear):
    def forward(self, x):
        return x + nn.functional.dropout(super().forward(x).tanh(), 0.1)


class Tied(nn.Module):
    """Layers between an embedding and the same weights turned round, and a number of which one rank has all."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(Layer(6, 6) for _ in range(2))
        self.out = nn.Linear(6, 7, bias=False)
        self.out.weight = self.embed.weight
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return self.out(h) + self.shift


class Outcome(NamedTuple):
    """The weights of the whole model, which rank 0 alone has, the norm of each step, and the elements held here."""

    weights: dict
    norms: list[float]
    held: int


def train_on_a_rank(accelerator, batches=range(8), optimizer_first=False, load=None, save=None):
    """Train in windows of two micro-batches, from different weights on each rank, of which rank 0's count.

    Args:
        batches: the numbers of the micro-batches.
        optimizer_first: the optimizer is prepared before the model, and not with it.
        load, save: the folders of checkpoints at the beginning and at the end.
    """
    torch.manual_seed(accelerator.process_index)
    model = Tied().to(torch.float32 if accelerator.native_amp else torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if optimizer_first:
        optimizer = accelerator.prepare(optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    parts = [each.to_local() if hasattr(each, "to_local") else each for each in model.parameters()]
    torch.manual_seed(accelerator.process_index)
    if load:
        accelerator.load_state(load)
    norms = []
    for number in batches:
        tokens = torch.arange(12).roll(number) % 7
        share = tokens.chunk(accelerator.num_processes)[accelerator.process_index]
        with accelerator.accumulate(model):
            accelerator.backward(model(share).square().mean())
            if accelerator.sync_gradients:
                # Nothing is clipped: FSDP's norm is the same up to rounding only.
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 1e9).item())
            optimizer.step()
            optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())  # A script may go back to a state that any rank has kept.
        with torch.no_grad():
            model(tokens)  # An evaluation leaves nothing gathered.
    if save:
        accelerator.save_state(save)
    return Outcome(accelerator.get_state_dict(model), norms, held=sum(part.numel() for part in parts))


def train(fsdp, precision="no", **training):
    """The outcomes on two ranks, under FSDP with these settings, or under DDP where they are None."""
    fsdp_plugin = None if fsdp is None else plugin(**fsdp)
    settings = {"fsdp_plugin": fsdp_plugin, "mixed_precision": precision, "gradient_accumulation_steps": 2}
    return on_ranks(2, partial(train_on_a_rank, **training), **settings)


@pytest.mark.parametrize(
    ("fsdp", "precision", "optimizer_first"),
    [
        ({}, "no", False),
        (SIZED, "no", True),
        ({**LAYERS, "reshard_after_forward": False}, "no", True),
        ({**LAYERS, "activation_checkpointing": True}, "bf16", False),
    ],
)
def test_two_ranks_end_with_the_bits_of_ddp_and_each_has_a_half(fsdp, precision, optimizer_first):
    first, second = train(fsdp, precision, optimizer_first=optimizer_first)
    copied, other = train(None, precision)
    shorter, _ = train(fsdp, precision, batches=range(6))
    assert max_weight_difference(first.weights, copied.weights) == 0
    assert max_weight_difference(first.weights, shorter.weights) > 0
    assert first.norms == pytest.approx(copied.norms, rel=1e-6) and len(first.norms) == 4
    assert second.weights == {}, "rank 1 has lent its part only"
    assert first.held + second.held == copied.held == other.held
    assert second.held < 0.5 * copied.held


@pytest.mark.parametrize(
    ("before", "after", "stop"),  # Four micro-batches end a window, and five are within one.
    [(SIZED, LAYERS, 4), (SIZED, LAYERS, 5), (SIZED, None, 5), (None, SIZED, 5)],
)
def test_a_checkpoint_goes_on_under_fsdp_and_under_ddp(tmp_path, before, after, stop):
    """`tests/faults/test_saving.py` does the same with killed jobs and with other numbers of ranks."""
    straight, _ = train(before)
    train(before, batches=range(stop), save=tmp_path / "saved")
    resumed, _ = train(after, batches=range(stop, 8), load=tmp_path / "saved")
    assert max_weight_difference(resumed.weights, straight.weights) == 0


def fail_to_save_and_to_load(accelerator):
    """The rank parts of a checkpoint after a save that failed on rank 0 alone; then a load fails on rank 1 alone."""

    def fail_on(rank):
        if accelerator.process_index == rank:
            raise OSError("alone")

    model = accelerator.prepare(Tied())
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.arange(3)).sum())
    hook = accelerator.register_save_state_pre_hook(lambda *_: fail_on(0))
    with pytest.raises((OSError, RemoteError), match="alone"):
        accelerator.save_state()
    hook.remove()
    folder = accelerator.save_state()
    accelerator.register_load_state_pre_hook(lambda *_: fail_on(1))
    with pytest.raises((OSError, RemoteError), match="alone"):
        accelerator.load_state()
    return sorted(path.name for path in folder.glob("random_states_*"))


def test_a_rank_that_fails_alone_leaves_nobody_waiting(tmp_path):
    numbered = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True)
    settings = {"fsdp_plugin": plugin(**SIZED), "project_config": numbered, "gradient_accumulation_steps": 2}
    parts = ["random_states_0.pkl", "random_states_1.pkl"]
    assert on_ranks(2, fail_to_save_and_to_load, **settings) == [parts, parts]


def make_a_second_accelerator(accelerator):
    assert accelerator.distributed_type == DistributedType.FSDP
    assert Accelerator(cpu=True).state.fsdp_plugin is accelerator.state.fsdp_plugin, "the launcher asks for another"
    with pytest.raises(ValueError, match="the first Accelerator chose other FSDP settings"):
        Accelerator(cpu=True, fsdp_plugin=plugin())


def test_a_second_accelerator_has_the_settings_of_the_first():
    launched = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    on_ranks(2, make_a_second_accelerator, fsdp_plugin=plugin(**SIZED), environment=launched)


def load_weights_that_do_not_fit(accelerator):
    model = accelerator.prepare(Tied())
    with pytest.raises(RuntimeError, match="size mismatch for shift"):
        model.load_state_dict({**Tied().state_dict(), "shift": torch.zeros(2)})


def test_weights_that_do_not_fit_are_refused():
    on_ranks(2, load_weights_that_do_not_fit, fsdp_plugin=plugin(**SIZED))


def test_settings_that_cannot_be_followed_are_refused():
    with pytest.raises(RankFailed, match="Could not find the transformer layer class Lair in the model"):
        train({**LAYERS, "transformer_cls_names_to_wrap": ["Layer", "Lair"]})
    with pytest.raises(RankFailed, match="FSDP in fp16 is out of scope"):
        train({}, "fp16")
    with pytest.raises(TypeError, match="must be a FullyShardedDataParallelPlugin"):
        Accelerator(cpu=True, fsdp_plugin=True)


def join_uneven_inputs(accelerator):
    """The rows of each batch of this process, and the file that the warning names."""
    model, loader = accelerator.prepare(Tied(), DataLoader(torch.arange(9) % 7, batch_size=3))
    uneven = accelerator.join_uneven_inputs([model], even_batches=False)
    with pytest.warns(UserWarning, match="has no effect under FSDP") as warned, uneven:
        rows = [len(model(batch)) for batch in loader]
    return rows, warned[0].filename


def test_uneven_inputs_are_not_joined_and_batches_stay_even():
    assert on_ranks(2, join_uneven_inputs, fsdp_plugin=plugin()) == [([3, 3], __file__)] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fsdp_version": None}, "FSDP of version 1 is out of scope"),
        ({"cpu_offload": True}, "FSDP with cpu_offload=True is out of scope"),
        ({"state_dict_type": "local_state_dict"}, "state_dict_type=LOCAL_STATE_DICT is out of scope"),
        ({"auto_wrap_policy": len}, "an auto_wrap_policy that is a function is out of scope"),
        ({"auto_wrap_policy": "by_layer"}, "auto_wrap_policy 'BY_LAYER' is none of TRANSFORMER_BASED_WRAP"),
        ({"reshard_after_forward": "FULL_SHARD"}, "reshard_after_forward must be true or false, not 'FULL_SHARD'"),
        ({"activation_checkpointing": True}, "activation_checkpointing needs an auto_wrap_policy"),
        ({"sharding_strategy": "FULL_SHARD"}, "unexpected keyword argument 'sharding_strategy'"),
    ],
)
def test_a_bad_plugin_is_one_clear_line(settings, message):
    with pytest.raises((NotImplementedError, TypeError, ValueError), match=message) as raised:
        plugin(**settings)
    assert "\n" not in str(raised.value)


def test_settings_without_effect_are_named(caplog):
    PartialState(cpu=True)
    plugin(state_dict_type="SHARDED_STATE_DICT", use_orig_params=True).warn_of_what_has_no_effect()
    first, second = [record.getMessage() for record in caplog.records]
    assert "use_orig_params has no effect" in first and "checkpoints hold whole tensors" in second


def test_the_launchers_variables_are_the_defaults(monkeypatch):
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP")
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "Layer,Block")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    launched = FullyShardedDataParallelPlugin(min_num_params=3)
    assert launched.transformer_cls_names_to_wrap == ["Layer", "Block"] and not launched.reshard_after_forward
    # Without a process group there is nobody to share with: as in the original, nothing is sharded.
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert Accelerator(cpu=True).state.fsdp_plugin is None


def collect_warnings(accelerator):
    messages = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.accelerator.utils.fsdp_utils.logger.warning", messages.append)
        accelerator.prepare(Tied())
    return messages


@pytest.mark.parametrize("fsdp", [{**LAYERS, "transformer_cls_names_to_wrap": None}, {**SIZED, "min_num_params": 0}])
def test_a_policy_that_finds_no_layer_to_wrap_is_warned_of(fsdp):
    """accelerate gathers the whole model at once, and says nothing."""
    without_layers = plugin(**fsdp)
    for messages in on_ranks(2, collect_warnings, fsdp_plugin=without_layers):
        (message,) = messages
        assert f"{without_layers.auto_wrap_policy} finds no layer to wrap" in message
