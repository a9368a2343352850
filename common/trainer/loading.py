"""The loaders of a Trainer, before the accelerator deals them out to the ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from common.accelerator import Accelerator, utils
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

    def for_training(self, dataset: Dataset | None) -> DataLoader:
        """A loader in random order; a stream keeps its own order.

        Raises:
            ValueError: without a dataset.
        """
        dataset = _given(dataset)
        settings = self._settings()
        if not isinstance(dataset, IterableDataset):
            settings["shuffle"] = True
            settings["drop_last"] = self.args.dataloader_drop_last
            num_workers = self.args.dataloader_num_workers
            rank = self.accelerator.process_index
            settings["worker_init_fn"] = partial(seed_worker, num_workers=num_workers, rank=rank)
        return DataLoader(dataset, self.args.per_device_train_batch_size, **settings)

    def for_evaluation(self, dataset: Dataset | None) -> DataLoader:
        """A loader in the dataset's order, which drops nothing.

        Raises:
            ValueError: without a dataset.
        """
        return DataLoader(_given(dataset), self.args.per_device_eval_batch_size, **self._settings())


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
