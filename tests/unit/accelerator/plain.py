"""Results of operations in a form that `==` compares."""

import collections
import collections.abc

import torch

Point = collections.namedtuple("Point", "x y")


def plain(result):
    """`result` in a form that `==` compares, with the types of containers and tensors."""
    if isinstance(result, torch.Tensor):
        return ("tensor", str(result.dtype), list(result.shape), result.tolist())
    if isinstance(result, collections.abc.Mapping):
        return (type(result).__name__, {key: plain(value) for key, value in result.items()})
    if isinstance(result, (list, tuple)):
        return (type(result).__name__, [plain(value) for value in result])
    return result
