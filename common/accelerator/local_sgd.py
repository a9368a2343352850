"""Local SGD: processes step on their own and average their weights every few steps."""

import contextlib
from types import TracebackType

import torch

from .accelerator import Accelerator
from .state import DistributedType


class LocalSGD:
    """Train without averaging gradients, and average the weights every `local_sgd_steps` steps instead.

    It saves communication and changes the training: S. U. Stich, "Local SGD Converges Fast and Communicates Little",
    https://arxiv.org/abs/1805.09767. On one process it does nothing.

        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
            for batch in loader:
                …
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()

    Args:
        accelerator: the one that prepared the model.
        model: prepared, and so in DistributedDataParallel.
        local_sgd_steps: calls of `step` between two averages. Leaving the block averages too.
        enabled: False leaves the training as it is.
    """

    def __init__(
        self, accelerator: Accelerator, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if accelerator.is_fsdp2:
            raise NotImplementedError("LocalSGD is supported only for models that each process has whole, not by FSDP")
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.enabled = enabled and accelerator.distributed_type != DistributedType.NO
        self.num_steps = 0
        # It holds `no_sync` from the beginning of the block to its end.
        self._local_gradients = contextlib.ExitStack()

    def __enter__(self) -> "LocalSGD":
        if self.enabled:
            self._local_gradients.enter_context(self.accelerator.no_sync(self.model))
        return self

    def __exit__(
        self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After an error the other ranks do not come here. Averaging would wait for them, and hide the error.
        if self.enabled and value is None:
            self._average_weights()
        self._local_gradients.close()

    def step(self) -> None:
        """Count a step, and average the weights if it is the last of `local_sgd_steps`. A collective then."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average_weights()

    def _average_weights(self) -> None:
        self.accelerator.wait_for_everyone()
        parameters = list(self.model.parameters())
        averages = self.accelerator.reduce([parameter.data for parameter in parameters], reduction="mean")
        for parameter, average in zip(parameters, averages, strict=True):
            parameter.data = average
