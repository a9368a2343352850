"""ZeRO-3: a rank keeps its part of the parameters too; a layer is whole only while it computes."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from common.small.ddp.replicas import broadcast_from_rank_0
from common.small.zero.shard import Shard


class FreeableShard(Shard):
    """A Shard whose part has memory of its own, so that the memory of the whole parameter can be given back."""

    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__(parameter)
        self.part.data = self.part.data.clone()
        self.bytes = self.flat.nbytes
        self.free()

    def gather(self) -> None:
        self.flat.untyped_storage().resize_(self.bytes)
        super().gather()

    def free(self) -> None:
        # The tensor itself stays: the network and autograd refer to it. Only its memory goes, until `gather`.
        self.flat.untyped_storage().resize_(0)


class ZeRO3:
    """An optimizer whose state, gradients and parameters are shared out: each of W ranks has 1/W of each.

    A layer is a module with parameters of its own. It is gathered twice in a step:

        forward of the layer      all-gather, compute, free
        backward of the layer     all-gather, compute, reduce-scatter of the gradients, free

    Every rank must call the layers in the same order, in an evaluation too. No operation may change a layer's output
    in place.

    Args:
        module, optimizer_class, settings: as of `ZeRO1`.
    """

    def __init__(self, module: nn.Module, optimizer_class: type[Optimizer], **settings) -> None:
        broadcast_from_rank_0(module)
        self.shards = {}
        for parameter in module.parameters():
            if parameter.requires_grad:
                self.shards[parameter] = FreeableShard(parameter)
                parameter.register_post_accumulate_grad_hook(self._reduce_gradient_and_free)
        self.optimizer = optimizer_class([shard.part for shard in self.shards.values()], **settings)
        for layer in module.modules():
            if self._shards_of(layer):
                layer.register_forward_pre_hook(self._gather_layer)
                layer.register_forward_hook(self._free_layer)
                layer.register_full_backward_pre_hook(self._gather_layer)

    def _shards_of(self, layer: nn.Module) -> list[FreeableShard]:
        """Of the layer's own parameters that are trained; frozen ones stay whole."""
        return [self.shards[parameter] for parameter in layer.parameters(recurse=False) if parameter in self.shards]

    def _gather_layer(self, layer: nn.Module, *_) -> None:
        for shard in self._shards_of(layer):
            shard.gather()

    def _free_layer(self, layer: nn.Module, *_) -> None:
        for shard in self._shards_of(layer):
            shard.free()

    def _reduce_gradient_and_free(self, parameter: nn.Parameter) -> None:
        # Backward computes a parameter's gradient after all that needs the parameter, which can go now.
        shard = self.shards[parameter]
        shard.reduce_gradient()
        shard.free()

    def step(self) -> None:
        """One step of this rank's parts with the mean gradients that backward has left. No rank waits for another."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """A context in which all parameters are whole, to be saved or looked at. A collective."""
        for shard in self.shards.values():
            shard.gather()
        try:
            yield
        finally:
            for shard in self.shards.values():
                shard.free()
