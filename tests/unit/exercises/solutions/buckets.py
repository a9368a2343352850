import torch
import torch.distributed as dist
from torch.nn import Parameter


def fill_buckets(parameters: list[Parameter], capacity: int) -> list[list[Parameter]]:
    buckets = []
    filling: list[Parameter] = []
    size = 0
    for parameter in reversed(parameters):
        filling.append(parameter)
        size += parameter.nbytes
        if size >= capacity:
            buckets.append(filling)
            filling = []
            size = 0
    if filling:
        buckets.append(filling)
    return buckets


def average_bucket(bucket: list[Parameter]) -> None:
    message = torch.cat([parameter.grad.flatten() for parameter in bucket])
    dist.all_reduce(message)
    message /= dist.get_world_size()
    start = 0
    for parameter in bucket:
        part = message[start : start + parameter.numel()]
        parameter.grad.copy_(part.view_as(parameter))
        start += parameter.numel()
