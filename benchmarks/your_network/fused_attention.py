"""Attention as a GPU computes it: in one fused operator, which keeps no scores for backward.

The fused operator of a GPU includes dropout. That of a CPU does not: with dropout, a CPU computes attention in some ten
operators, which keep the scores of each pair of positions. So the dropout is left out here.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def fused_attention() -> Iterator[None]:
    """A block in which `scaled_dot_product_attention` has no dropout on a CPU, in any thread of this process.

    What is replaced is the operator and not its name in Python. So it does not matter who calls it: a file that
    imported the name, a module of torch, or backward where a checkpointed unit is computed again. A public `Library`
    would stay in place until the garbage collector removes it.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", _attend_without_dropout, "AutogradCPU")
        yield


def _attend_without_dropout(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options) -> Tensor:
    # `decompose` is torch's own implementation, which this one stands in front of.
    attention = torch.ops.aten.scaled_dot_product_attention.default
    return attention.decompose(query, key, value, attn_mask, 0.0, is_causal, **options)
