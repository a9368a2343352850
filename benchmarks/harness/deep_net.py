"""A network with many parameters of very different sizes, so that the order and the size of messages matter.

BasicNet has eight parameters, and one of them holds 98 % of the bytes: whatever the size of a bucket, there is one
large message. This network has 52 parameters with 7.6 MB. As in most convolutional networks, the last layers hold most
of them, and backward computes their gradients first.
"""

import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (32, 64, 128, 192)
BLOCKS = 4  # of each width
IMAGE = (1, 28, 28)
CLASSES = 10


class Block(nn.Module):
    """A 3×3 convolution with a normalisation, added to its input where the two have the same shape."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.halves = inputs != outputs
        self.convolution = nn.Conv2d(inputs, outputs, 3, stride=2 if self.halves else 1, padding=1, bias=False)
        # Not batch normalisation: DDP would send its running means too.
        self.normalisation = nn.GroupNorm(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.normalisation(self.convolution(x)))
        return y if self.halves else x + y


class DeepNet(nn.Module):
    """A small residual network: images of shape (N, 1, 28, 28) to log-probabilities of shape (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, WIDTHS[0], 3, padding=1)
        blocks = []
        before = WIDTHS[0]
        for width in WIDTHS:
            for _ in range(BLOCKS):
                blocks.append(Block(before, width))
                before = width
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(WIDTHS[-1], CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(self.stem(images))
        return F.log_softmax(self.classifier(features.mean((2, 3))), dim=1)
