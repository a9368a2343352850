import torch
import torch.distributed as dist
from torch import Tensor, nn


def accuracy(model: nn.Module, dataset: list[tuple[Tensor, int]]) -> float:
    own = dataset[dist.get_rank() :: dist.get_world_size()]
    counts = torch.zeros(2, dtype=torch.float64)
    for image, label in own:
        counts[0] += model(image[None]).argmax(dim=1).item() == label
        counts[1] += 1
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()
