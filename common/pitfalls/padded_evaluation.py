"""Evaluation with a padded sampler: some samples count twice.

DistributedSampler makes all shards equally long, because training needs that:
it repeats samples from the start, or drops some from the end with
`drop_last=True`. Either way the accuracy is that of another test set, one that
depends on the number of processes. DistributedEvalSampler pads nothing.
"""

from collections import Counter

from torch.utils.data import DataLoader, DistributedSampler

from common.eval_sampler import DistributedEvalSampler
from common.process_group import all_gather_object

TEST_SET = range(10_000)


def wrong():
    sampler = DistributedSampler(TEST_SET, shuffle=False)
    return DataLoader(TEST_SET, batch_size=500, sampler=sampler)


def right():
    sampler = DistributedEvalSampler(TEST_SET)
    return DataLoader(TEST_SET, batch_size=500, sampler=sampler)


def detect(loader):
    shards = all_gather_object(list(loader.sampler))
    visits = Counter(index for shard in shards for index in shard)
    twice = sorted(index for index, count in visits.items() if count > 1)
    missing = len(loader.dataset) - len(visits)
    if twice or missing:
        repeated = f"{len(twice)} samples count more than once {twice[:3]}"
        return f"{repeated}, {missing} never"
