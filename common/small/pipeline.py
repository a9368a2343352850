"""Pipeline parallelism: the network is cut into stages, one for each rank, and the batch into micro-batches.

A stage receives activations from the stage before, computes its layers, and sends the result to the stage after; in
backward, gradients go the other way. For BasicNet on two ranks:

                rank 0                  rank 1                  what is sent for each micro-batch
    forward     conv1, conv2        →   fc1, fc2, loss          the activations between conv2 and fc1
    backward    conv2, conv1        ←   loss, fc2, fc1          their gradient

While a stage computes one micro-batch, its neighbours compute others. At the beginning and at the end of a step some
stages have nothing to do: that is the *bubble*, which `schedules.timeline` draws.

Autograd's graph ends at the border of a stage: `detach` cuts it, and `outputs.backward(gradient)` goes on behind it
with the gradient that has been received. The messages are written for gloo. MODEL_PARALLEL.md has a picture of a step.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common.small.schedules import Schedule


def layers_of(model) -> list[nn.Sequential]:
    """BasicNet as four modules to be called one after the other; they share its parameters."""
    return [
        nn.Sequential(model.conv1, nn.ReLU()),
        nn.Sequential(model.conv2, nn.ReLU(), nn.MaxPool2d(2), model.dropout1),
        nn.Sequential(nn.Flatten(), model.fc1, nn.ReLU()),
        nn.Sequential(model.dropout2, model.fc2, nn.LogSoftmax(dim=1)),
    ]


class Stage:
    """This rank's layers, and what it exchanges with its neighbours.

    Args:
        layers: of the whole network, at least one for each rank.
        sample: one input of the network, shape (1, …), from which a stage learns the shape of what it will receive.

    Attributes:
        module: this rank's layers. Its optimizer gets their parameters, and no others.
    """

    def __init__(self, layers: list[nn.Sequential], sample: Tensor) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        if len(layers) < self.world_size:
            raise ValueError(f"{len(layers)} layers cannot be shared out among {self.world_size} ranks")
        self.is_first = self.rank == 0
        self.is_last = self.rank == self.world_size - 1
        start = len(layers) * self.rank // self.world_size
        end = len(layers) * (self.rank + 1) // self.world_size
        self.module = nn.Sequential(*layers[start:end])
        # A copy in evaluation mode draws no random numbers, and the statistics of the network stay as they are.
        earlier = copy.deepcopy(nn.Sequential(*layers[:start])).eval()
        with torch.no_grad():
            self._example = earlier(sample)  # for its shape and type only
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # by micro-batch: inputs and outputs, until its backward
        self._sending: dict[int, tuple[dist.Work, Tensor]] = {}  # by rank: the last message to it

    def step(self, images: Tensor, targets: Tensor, micro_batches: int, schedule: Schedule) -> None:
        """Add the gradient of the mean loss to `.grad` of this rank's layers.

        Every rank gets the whole batch: the first needs the images, the last the targets, and all of them the sizes.
        """
        image_parts = images.tensor_split(micro_batches)
        target_parts = targets.tensor_split(micro_batches)
        for kind, number in schedule(self.rank, self.world_size, micro_batches):
            if kind == "forward":
                self._forward(number, image_parts[number], target_parts[number], len(targets))
            else:
                self._backward(number)
        for neighbour in list(self._sending):
            self._wait_until_sent(neighbour)

    def _forward(self, number: int, images: Tensor, targets: Tensor, batch_size: int) -> None:
        if self.is_first:
            inputs = images
        else:
            inputs = self._example.new_empty(len(images), *self._example.shape[1:])
            dist.recv(inputs, self.rank - 1)
            inputs.requires_grad_()  # so that backward computes what the stage before needs
        outputs = self.module(inputs)
        if self.is_last:
            # A sum, divided by the size of the whole batch: micro-batches may differ in size.
            outputs = F.nll_loss(outputs, targets, reduction="sum") / batch_size
        else:
            self._send(outputs.detach(), self.rank + 1)
        self._kept[number] = (inputs, outputs)

    def _backward(self, number: int) -> None:
        inputs, outputs = self._kept.pop(number)
        if self.is_last:
            outputs.backward()
        else:
            gradient = torch.empty_like(outputs)
            dist.recv(gradient, self.rank + 1)
            if outputs.requires_grad:  # not if all layers up to here are frozen
                outputs.backward(gradient)
        if not self.is_first:
            self._send(inputs.grad, self.rank - 1)

    def _send(self, tensor: Tensor, neighbour: int) -> None:
        # In 1F1B two neighbours send to each other at the same time. If each waited here until its message had arrived,
        # neither would come to receive. So the stage goes on, with one message to each neighbour under way.
        self._wait_until_sent(neighbour)
        work = dist.isend(tensor, neighbour)
        self._sending[neighbour] = (work, tensor)  # the tensor has to live until it has been sent

    def _wait_until_sent(self, neighbour: int) -> None:
        if neighbour in self._sending:
            work, _ = self._sending.pop(neighbour)
            work.wait()
