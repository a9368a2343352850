"""BasicNet, the one network that every level trains."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN = 128  # outputs of fc1


class BasicNet(nn.Module):
    """The network of PyTorch's own MNIST example: two convolutions, two linear layers, 1,199,882 parameters.

    `forward` takes images of shape (N, 1, 28, 28) and returns log-probabilities of shape (N, 10).
    Source: https://github.com/pytorch/examples/blob/main/mnist/main.py.
    """

    def __init__(self, dropout: bool = True) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25 if dropout else 0.0)
        self.fc1 = nn.Linear(9216, HIDDEN)
        self.dropout2 = nn.Dropout(0.5 if dropout else 0.0)
        self.fc2 = nn.Linear(HIDDEN, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.conv1(images))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        x = self.fc2(self.dropout2(x))
        return F.log_softmax(x, dim=1)


def build_model(args) -> BasicNet:
    """BasicNet on the CPU with the weights that `args.seed` draws, in `args.dtype`, honouring `args.no_dropout`.

    The weights are drawn in float32 whatever the dtype, so that runs in float32 and float64 start at the same point.
    """
    torch.manual_seed(args.seed)
    return BasicNet(dropout=not args.no_dropout).to(args.dtype)
