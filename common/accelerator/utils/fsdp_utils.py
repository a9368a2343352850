"""FSDP, version 2: each rank keeps its part of every parameter, gradient and optimizer state.

    rank 0     part of each layer ──┐ all-gather   a layer is whole while it computes, in forward and in backward
    rank 1     part of each layer ──┤
    rank 2     part of each layer ──┘ ◄── reduce-scatter: of each gradient a rank gets the mean of its own part

torch's `fully_shard` does this. This file chooses the layers, and converts between whole tensors and parts, so that
state dicts and checkpoints are the same as without FSDP.
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
from .weights import is_part

logger = get_logger(__name__)


# Sharding a model


def shard_model(model: nn.Module, plugin: FullyShardedDataParallelPlugin, device: torch.device) -> None:
    """Leave this rank its part of `model`, in place. A collective: the parts are those of rank 0's weights.

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
        whole[name]._part = parameter  # `give_parts` finds it here for an optimizer that was made before
    for module in model.modules():
        module.register_load_state_dict_pre_hook(_take_parts)
    model.register_forward_hook(_free_after_evaluation)


def _layers_to_wrap(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> list[nn.Module]:
    """The layers that are gathered apart from the others, the inner ones first."""
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
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported, for the reason given in `is_part`
    if fsdp is None:
        return []
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def give_parts(optimizer: torch.optim.Optimizer) -> None:
    """Replace the parameters of `optimizer` by their parts, if it was made before the model was sharded."""
    for group in optimizer.param_groups:
        for index, whole in enumerate(group["params"]):
            part = getattr(whole, "_part", None)
            if part is None:
                continue
            group["params"][index] = part
            state = optimizer.state.pop(whole, None)
            if state is not None:
                optimizer.state[part] = _parts_of_state(state, part)


# Whole tensors and parts


def _part_like(parameter: Any, whole: Any) -> Any:
    """This rank's part of `whole`, cut as `parameter` is; anything that is not as large stays as it is."""
    if not isinstance(whole, Tensor) or is_part(whole) or whole.shape != parameter.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    # Without a source rank nothing is sent, and each rank cuts its own copy.
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _parts_of_state(state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    return {name: _part_like(parameter, value) for name, value in state.items()}


def _take_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Cut the whole weights that a script or a checkpoint loads into `module`."""
    for name, parameter in module.named_parameters(recurse=False):
        if is_part(parameter) and prefix + name in state_dict:
            state_dict[prefix + name] = _part_like(parameter, state_dict[prefix + name])


def _gather(value: Any, keep: bool) -> Any:
    """`value`, or the whole tensor on the CPU if `value` is a part. Then it is a collective.

    Without `keep` it takes part in the all-gather, but returns None.
    """
    if not is_part(value):
        return value.detach() if isinstance(value, Tensor) else value
    whole = value.detach().full_tensor()
    return whole.cpu() if keep else None


def whole_state_dict(model: nn.Module, keep: bool) -> dict[str, Any]:
    """The whole weights of `model` on the CPU, and its buffers where they are; empty without `keep`. A collective.

    Tied weights are the same tensor.
    """
    state_dict = model.state_dict(keep_vars=True)
    gathered: dict[int, Any] = {}
    for name, value in state_dict.items():
        if id(value) not in gathered:
            gathered[id(value)] = _gather(value, keep)
        state_dict[name] = gathered[id(value)]
    return state_dict if keep else {}


def whole_optimizer_state(optimizer: torch.optim.Optimizer, keep: bool) -> dict[str, Any]:
    """The state dict of `optimizer`, with whole tensors on the CPU; without `keep` no state. A collective."""
    state_dict = optimizer.state_dict()
    states = {}
    for number, state in state_dict["state"].items():
        states[number] = {name: _gather(value, keep) for name, value in state.items()}
    return {**state_dict, "state": states if keep else {}}


def load_whole_optimizer_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load the parts of what `whole_optimizer_state` gave, on any number of ranks."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    states = dict(state_dict["state"])
    for number, parameter in zip(numbers, parameters, strict=False):  # `load_state_dict` says where groups differ
        if number in states:
            states[number] = _parts_of_state(states[number], parameter)
    optimizer.load_state_dict({**state_dict, "state": states})


# Gradients


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
