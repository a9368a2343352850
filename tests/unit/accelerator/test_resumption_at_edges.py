"""Exact resumption of stateful loaders that are copied, saved while they read, or have a batch sampler that changes."""

import copy

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from common.accelerator.data_loader import prepare_data_loader
from common.accelerator.utils import listify
from common.accelerator.utils.random import get_random_states, set_random_states
from tests.toys import Numbers

CPU = torch.device("cpu")


def prepared(*args, **kwargs):
    return prepare_data_loader(DataLoader(*args, **kwargs), use_stateful_dataloader=True)


class SavedWhileItIsRead(Numbers):
    """Numbers with noise. The ninth that is read saves the state of `loader`."""

    num_read = 0

    def __getitem__(self, index):
        self.num_read += 1
        if self.num_read == 9:
            self.saved = self.loader.state_dict(), get_random_states(CPU)
        return super().__getitem__(index) + torch.rand(())


class NewSampler(BatchSampler):
    def set_epoch(self, epoch):
        seed = int(torch.randint(1000, ()))
        self.sampler = RandomSampler(range(10), generator=torch.Generator().manual_seed(seed))


def test_a_copy_of_a_loaded_loader_goes_on_at_the_same_place():
    loader = prepared(range(10), batch_size=2, shuffle=True)
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict(loader.state_dict())
    iterator.close()
    second = copy.copy(loader)
    assert listify(list(loader)) == listify(list(second)) and len(list(second)) == 5


def test_a_state_that_is_saved_while_a_batch_is_read_has_the_generators_of_the_batch_before():
    data = SavedWhileItIsRead(10)
    data.loader = prepared(data, batch_size=2)
    batches = listify(list(data.loader))
    state, random_states = data.saved
    data.loader.load_state_dict(state)
    set_random_states(CPU, random_states)
    assert listify(list(data.loader))[0] == batches[3]


def test_a_batch_sampler_that_gets_a_new_sampler_in_each_epoch_makes_the_same_order_again():
    def new():
        return prepared(range(10), batch_sampler=NewSampler(RandomSampler(range(10)), 2, False))

    loader = new()
    iterator = iter(loader)
    next(iterator)
    state, random_states = loader.state_dict(), get_random_states(CPU)
    rest = listify(list(iterator))
    resumed = new()
    resumed.load_state_dict(state)
    set_random_states(CPU, random_states)
    assert listify(list(resumed)) == rest
