"""Networks whose memory goes to different places: activations, optimizer state, or the output."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.model import BasicNet


@dataclass(frozen=True)
class ReferenceNetwork:
    """A network, by the function that builds it, and the shape of a batch for it."""

    title: str
    build: Callable[[], nn.Module]
    image: tuple[int, ...]  # the shape of one sample
    classes: int
    batch_size: int  # global
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy

    def batch(self) -> tuple[Tensor, Tensor]:
        """Noise of the right shape, (batch_size, *image), and as many labels."""
        return torch.randn(self.batch_size, *self.image), torch.randint(self.classes, (self.batch_size,))


def resnet18() -> nn.Module:
    """ResNet-18 for images of 32×32: its first convolution is 3×3 with stride 1, and the first pooling goes."""
    from torchvision.models import resnet18

    model = resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def big_output() -> nn.Module:
    """A small trunk under 20,000 classes, as many as a vocabulary: for one sample the output has 80 kB."""
    return nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 20_000))


NETWORKS = {
    "basic_net": ReferenceNetwork("BasicNet", BasicNet, (1, 28, 28), 10, 64, F.nll_loss),
    "resnet18": ReferenceNetwork("ResNet-18", resnet18, (3, 32, 32), 10, 16),
    "big_output": ReferenceNetwork("20,000 classes", big_output, (256,), 20_000, 512),
}
