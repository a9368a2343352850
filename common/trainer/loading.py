"""The loaders of a Trainer: those that it makes, and those that an override of its methods returns."""

from collections.abc import Callable, Generator, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from common.accelerator import Accelerator, skip_first_batches, utils
from common.accelerator.data_loader import DataLoaderShard, index_sampler_of, prepare_data_loader
from common.accelerator.resume import StatefulDataLoaderShard, can_be_redrawn
from common.accelerator.sampler import SeedableRandomSampler, innermost_sampler
from common.trainer import batches
from common.trainer.arguments import TrainingArguments


class LoaderMaker:
    """Makes loaders of training and evaluation sets with the settings of a run.

    Args:
        collator: turns a list of samples into a batch.
        model: with `args.remove_unused_columns`, what its `forward` does not take is left out of samples.
        label_names: what is no parameter of `forward` and is kept all the same.
    """

    def __init__(
        self,
        args: TrainingArguments,
        accelerator: Accelerator,
        collator: Callable[[list], Any],
        model: nn.Module,
        label_names: list[str],
    ) -> None:
        self.args = args
        self.accelerator = accelerator
        self.collator = batches.ColumnFilter(collator, model, label_names) if args.remove_unused_columns else collator

    def _settings(self) -> dict[str, Any]:
        return {
            "collate_fn": self.collator,
            "num_workers": self.args.dataloader_num_workers,
            "pin_memory": self.args.dataloader_pin_memory and self.accelerator.device.type != "cpu",
        }

    def for_training(self, dataset: Dataset | None, sampler: Sampler | None = None) -> DataLoader:
        """A loader in the order of `sampler`; a stream, and without a sampler every dataset, keeps its own order.

        Raises:
            ValueError: without a dataset.
        """
        dataset = _given(dataset)
        settings = self._settings()
        if not isinstance(dataset, IterableDataset):
            settings["sampler"] = sampler
            settings["drop_last"] = self.args.dataloader_drop_last
            num_workers = self.args.dataloader_num_workers
            rank = self.accelerator.process_index
            settings["worker_init_fn"] = partial(seed_worker, num_workers=num_workers, rank=rank)
        return DataLoader(dataset, self.args.per_device_train_batch_size, **settings)

    def for_evaluation(self, dataset: Dataset | None, sampler: Sampler | None = None) -> DataLoader:
        """The same for an evaluation, which drops nothing.

        Raises:
            ValueError: without a dataset.
        """
        settings = self._settings()
        settings["sampler"] = sampler
        return DataLoader(_given(dataset), self.args.per_device_eval_batch_size, **settings)


def _given(dataset: Dataset | None) -> Dataset:
    if dataset is None:
        raise ValueError("the Trainer has been given no dataset for this: pass train_dataset, eval_dataset or both")
    return dataset


def seed_worker(worker_id: int, num_workers: int, rank: int) -> None:
    """Seed all generators of a loader worker: torch has seeded its own, with another number in each worker and epoch.

    The ranks draw the same number, because they have the same seed: each adds its own.
    """
    seed_of_worker = torch.initial_seed() % 2**32
    utils.set_seed(num_workers * rank + seed_of_worker)


def is_prepared(loader: Any) -> bool:
    """True for a loader that an accelerator has made: it puts batches on the device, and knows its last batch."""
    return isinstance(loader, DataLoaderShard)


def keeps_position(loader: Any) -> bool:
    """True for a loader whose position is in checkpoints, as is that of each one which the Trainer prepares."""
    return isinstance(loader, StatefulDataLoaderShard)


def every_rank_reads_all(loader: Any, num_processes: int) -> bool:
    """True for a loader to be dealt out to several ranks: a `DataLoader` that gives all of them the same batches."""
    if num_processes == 1 or is_prepared(loader) or not isinstance(loader, DataLoader):
        return False
    return not isinstance(innermost_sampler(index_sampler_of(loader)), DistributedSampler)


def prepare_for_training(loader: Any, accelerator: Accelerator) -> Any:
    """The loader that this rank trains on in place of one that `get_train_dataloader` returned.

    On one process the batches are those of `loader`, in its order. It becomes a loader of the accelerator all the same
    where that reads it in the same way, because a resumed run then continues exactly.
    """
    if is_prepared(loader) or every_rank_reads_all(loader, accelerator.num_processes):
        return accelerator.prepare_data_loader(loader)
    if accelerator.num_processes > 1 or not _has_fixed_order(loader):
        return loader
    in_same_order = prepare_data_loader(loader, accelerator.device, put_on_device=True, use_stateful_dataloader=True)
    return accelerator.prepare_data_loader(in_same_order)


def _has_fixed_order(loader: Any) -> bool:
    """True if a sampler of torch draws the order of an epoch when the epoch begins, and nothing else does."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    if type(loader).__iter__ is not DataLoader.__iter__:
        return False
    # The original tells a plain loader nothing of its epoch.
    sampler = innermost_sampler(index_sampler_of(loader))
    knows_epochs = hasattr(sampler, "set_epoch") or hasattr(loader.dataset, "set_epoch")
    return can_be_redrawn(index_sampler_of(loader)) and not knows_epochs


def seedable_sampler(loader: Any) -> SeedableRandomSampler | None:
    """The sampler that draws the order of a prepared loader from a seed and the epoch; None where nothing does."""
    if not is_prepared(loader) or isinstance(loader.dataset, IterableDataset):
        return None
    sampler = innermost_sampler(index_sampler_of(loader))
    return sampler if isinstance(sampler, SeedableRandomSampler) else None


def go_back_to(loader: Any, epoch: int, batches_done: int) -> None:
    """Let a loader that keeps its position, put further by a checkpoint, go on after `batches_done` of `epoch`."""
    position = loader.state_dict()
    loader.load_state_dict(position | {"epoch": epoch, "step": batches_done, "is_over": False})


def length_of(data: Any) -> int | None:
    """The length of a loader or a data set; None where it has none, as a stream."""
    try:
        return len(data)
    except TypeError:
        return None


def samples_per_step(loader: Any, num_processes: int) -> int:
    """Samples of all ranks in a micro-batch, as far as the loader says it."""
    if is_prepared(loader):
        return loader.total_batch_size
    return (getattr(loader, "batch_size", None) or 1) * num_processes


def read_batches(loader: Any, device: torch.device) -> Iterator[Any]:
    """The batches of any loader, on the device."""
    if is_prepared(loader):
        yield from loader
        return
    for batch in loader:
        yield utils.send_to_device(batch, device)


def read_epoch(loader: Any, epoch: int, batches_to_skip: int, device: torch.device) -> Generator[Any, None, None]:
    """The batches of an epoch, on the device, without the first `batches_to_skip`."""
    if is_prepared(loader):
        if batches_to_skip > 0:
            loader = skip_first_batches(loader, batches_to_skip)
        loader.set_epoch(epoch)
        yield from loader
        return
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)
    yield from islice(read_batches(loader, device), batches_to_skip, None)
