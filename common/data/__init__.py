"""MNIST, or its offline stand-in, as tensors: `load_data` gives the training and the test set."""

from common.data.digits import DigitImages, collate
from common.data.loading import load_data, provide
from common.data.mnist import mnist_on_disk

__all__ = ["DigitImages", "collate", "load_data", "mnist_on_disk", "provide"]
