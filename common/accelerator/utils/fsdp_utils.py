"""FSDP, version 2: each rank keeps its shard of every parameter, gradient and optimizer state.

    rank 0     shard of each layer ──┐ all-gather   a layer is whole while it computes, in forward and in backward
    rank 1     shard of each layer ──┤
    rank 2     shard of each layer ──┘ ◄── reduce-scatter: of each gradient a rank gets the mean of its own shard

torch's `fully_shard` does this. This file chooses the layers, and converts between whole tensors and shards, so that
state dicts and checkpoints are the same as without FSDP. A shard is a DTensor. A whole parameter that was sharded
has its shard in an attribute `_shard`, where `use_sharded_parameters` finds it for an optimizer made earlier.
"""

import functools
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..logging import get_logger
from ..operations import broadcast
from .dataclasses import FullyShardedDataParallelPlugin
from .weights import is_dtensor

logger = get_logger(__name__)


def shard_model(model: nn.Module, plugin: FullyShardedDataParallelPlugin, device: torch.device) -> None:
    """Leave this rank its shard of `model`, in place. A collective: the shards are cut from rank 0's weights.

    Raises:
        ValueError: for the name of a class that no layer has.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if isinstance(model, FSDPModule):
        return
    layers = _layers_to_wrap(model, plugin)
    policy = plugin.auto_wrap_policy
    if not layers and policy != "NO_WRAP":
        logger.warning(
            f"auto_wrap_policy={policy} finds no layer to wrap, so the whole model is gathered at once: "
            "set transformer_cls_names_to_wrap, or min_num_params where layers are wrapped by size"
        )
    whole: dict[str, Any] = dict(model.named_parameters())
    for tensor in [*whole.values(), *model.buffers()]:
        on_device = tensor.detach().to(device)  # each tensor alone, because the whole model may not fit
        tensor.detach().copy_(broadcast(on_device))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in layers:
        if plugin.activation_checkpointing:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        fully_shard(layer, mesh=mesh, reshard_after_forward=plugin.reshard_after_forward)
    # The model takes what is in none of these layers. By default torch keeps that gathered until the backward.
    fully_shard(model, mesh=mesh, reshard_after_forward=plugin.reshard_after_forward)
    for name, parameter in model.named_parameters():
        whole[name]._shard = parameter
    for module in model.modules():
        module.register_load_state_dict_pre_hook(_shard_loaded_weights)
    model.register_forward_hook(_free_after_evaluation)


def _layers_to_wrap(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> list[nn.Module]:
    layers = list(model.modules())[1:]
    if plugin.auto_wrap_policy == "TRANSFORMER_BASED_WRAP":
        names = plugin.transformer_cls_names_to_wrap or getattr(model, "_no_split_modules", None) or []
        wanted = [layer for layer in layers if type(layer).__name__ in names]
        missing = set(names) - {type(layer).__name__ for layer in wanted}
        if missing:
            raise ValueError(f"Could not find the transformer layer class {', '.join(sorted(missing))} in the model.")
    elif plugin.auto_wrap_policy == "SIZE_BASED_WRAP":
        wanted = [layer for layer in layers if _has_more_parameters(layer, plugin.min_num_params)]
    else:
        wanted = []
    # A parameter that several layers own is tied. It belongs to none of them, but to the model.
    owners: Counter[Tensor] = Counter()
    for module in model.modules():
        owners.update(module.parameters(recurse=False))
    tied = {parameter for parameter, num_owners in owners.items() if num_owners > 1}
    return [layer for layer in reversed(wanted) if tied.isdisjoint(layer.parameters())]


def _has_more_parameters(layer: nn.Module, limit: int) -> bool:
    """True for a layer with more than `limit` parameters, unless `limit` is 0 or the layer is a mere list of others."""
    size = sum(parameter.numel() for parameter in layer.parameters())
    return size > limit > 0 and not isinstance(layer, nn.ModuleList | nn.ModuleDict)


def _free_after_evaluation(model: nn.Module, *_: Any) -> None:
    """Free what a forward without a backward has gathered. Otherwise the backward frees it."""
    if not torch.is_grad_enabled():
        for module in _sharded_modules(model):
            module.reshard()


def _sharded_modules(model: nn.Module) -> list[Any]:
    """The modules for which `fully_shard` was called. It makes each of them an FSDPModule."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported, for the reason given in `is_dtensor`
    if fsdp is None:
        return []
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def use_sharded_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Replace the parameters of `optimizer` by their shards, if it was made before the model was sharded."""
    for group in optimizer.param_groups:
        for index, whole in enumerate(group["params"]):
            shard = getattr(whole, "_shard", None)
            if shard is None:
                continue
            group["params"][index] = shard
            state = optimizer.state.pop(whole, None)
            if state is not None:
                optimizer.state[shard] = _shard_state(state, shard)


def _shard_like(parameter: Any, whole: Any) -> Any:
    """This rank's shard of `whole`, cut as `parameter` is; anything that is not as large stays as it is."""
    if not isinstance(whole, Tensor) or is_dtensor(whole) or whole.shape != parameter.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    # Without a source rank nothing is sent, and each rank cuts its own copy.
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _shard_state(state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    return {name: _shard_like(parameter, value) for name, value in state.items()}


def _shard_loaded_weights(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Cut the whole weights that a script or a checkpoint loads into `module`."""
    for name, parameter in module.named_parameters(recurse=False):
        if is_dtensor(parameter) and prefix + name in state_dict:
            state_dict[prefix + name] = _shard_like(parameter, state_dict[prefix + name])


def _whole_on_cpu(value: Any, is_needed: bool) -> Any:
    """`value`, or the whole tensor on the CPU if `value` is a shard. Then it is a collective.

    A rank that does not need the tensor takes part in the all-gather nevertheless, and gets None.
    """
    if not is_dtensor(value):
        return value.detach() if isinstance(value, Tensor) else value
    whole = value.detach().full_tensor()
    return whole.cpu() if is_needed else None


def whole_state_dict(model: nn.Module, is_needed: bool) -> dict[str, Any]:
    """The whole weights of `model` on the CPU, and its buffers where they are; empty if not needed. A collective.

    Tied weights are the same tensor.
    """
    state_dict = model.state_dict(keep_vars=True)
    gathered: dict[int, Any] = {}
    for name, value in state_dict.items():
        if id(value) not in gathered:
            gathered[id(value)] = _whole_on_cpu(value, is_needed)
        state_dict[name] = gathered[id(value)]
    return state_dict if is_needed else {}


def whole_optimizer_state(optimizer: torch.optim.Optimizer, is_needed: bool) -> dict[str, Any]:
    """The state dict of `optimizer`, with whole tensors on the CPU; no state if not needed. A collective."""
    state_dict = optimizer.state_dict()
    states = {}
    for number, state in state_dict["state"].items():
        states[number] = {name: _whole_on_cpu(value, is_needed) for name, value in state.items()}
    return {**state_dict, "state": states if is_needed else {}}


def load_whole_optimizer_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load the shards of what `whole_optimizer_state` gave, on any number of ranks."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    states = dict(state_dict["state"])
    for number, parameter in zip(numbers, parameters, strict=False):  # `load_state_dict` says where groups differ
        if number in states:
            states[number] = _shard_state(states[number], parameter)
    optimizer.load_state_dict({**state_dict, "state": states})


@contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """In the block, backward does not average the gradients of a sharded `model`; they accumulate on each rank."""
    shards = _sharded_modules(model)
    for module in shards:
        module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        for module in shards:
            module.set_requires_gradient_sync(True)


@contextmanager
def whole_parameters(model: nn.Module) -> Iterator[None]:
    """In the block, the parameters of a sharded `model` are whole, and so are accumulated gradients. A collective."""
    for module in _sharded_modules(model):
        module.unshard()
    try:
        yield
    finally:
        for module in _sharded_modules(model):
            module.reshard()
