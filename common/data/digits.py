"""A set of digits as a Dataset: kept as bytes, and normalised a whole batch at a time."""

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info

MEAN = 0.1307
STD = 0.3081


class DigitImages(Dataset):
    """28×28 grey images and their labels 0–9, held as bytes and handed out normalised.

    One sample is a (1, 28, 28) tensor of `dtype` and an int64 label. `__getitems__`, which DataLoader calls with the
    indices of a whole batch, returns the batch already collated, images (N, 1, 28, 28) and labels (N,): give the
    loader `collate_fn=common.data.collate`. The values are those of torchvision's ToTensor and Normalize.

    Args:
        name: "mnist" or "synthetic"; it is part of every result.
        images: uint8, (n, 28, 28).
        labels: uint8, (n,).
        count: of the samples only the first so many are kept.
        device: images and labels are kept there, 47 MB for the training set of MNIST; by default where they are.
    """

    def __init__(
        self,
        name: str,
        images: Tensor,
        labels: Tensor,
        *,
        count: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self.name = name
        self.images = images[:count].unsqueeze(1).to(device)
        self.labels = labels[:count].long().to(device)
        self.dtype = dtype

    @property
    def device(self) -> torch.device:
        """The device of the images, and of the batches that are made of them."""
        return self.images.device

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._normalise(self.images[index]), self.labels[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(indices)
        if self.device.type == "cuda":
            # The CPU waits for a copy from memory that is not pinned.
            chosen = chosen.pin_memory().to(self.device, non_blocking=True)
        return self._normalise(self.images[chosen]), self.labels[chosen]

    def _normalise(self, images: Tensor) -> Tensor:
        # In place: the batch was copied out of the dataset by the indexing, or by the change of type.
        return images.to(self.dtype).div_(255).sub_(MEAN).div_(STD)


def collate(batch: tuple[Tensor, Tensor] | list) -> tuple[Tensor, Tensor]:
    """Pass on a batch that the dataset has already collated; collate a list of samples as DataLoader would."""
    if not isinstance(batch, tuple):
        batch = default_collate(batch)
    images, labels = batch
    if get_worker_info() is not None:
        # This is a loader worker, whose batches travel in shared memory. Where that is full, this raises in the
        # training. Without these lines a thread of the worker's queue would fail, and the training wait for ever.
        images.share_memory_()
        labels.share_memory_()
    return images, labels
