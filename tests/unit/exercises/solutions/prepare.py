from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler


def prepare(*objects: Any) -> list[Any]:
    return [prepare_one(obj) for obj in objects]


def prepare_one(obj: Any) -> Any:
    if isinstance(obj, nn.Module):
        return DistributedDataParallel(obj)
    if isinstance(obj, DataLoader):
        shuffle = isinstance(obj.sampler, RandomSampler)
        return DataLoader(
            obj.dataset,
            batch_size=obj.batch_size // dist.get_world_size(),
            sampler=DistributedSampler(obj.dataset, shuffle=shuffle),
            collate_fn=obj.collate_fn,
        )
    return obj
