"""Attention as a GPU computes it, on a CPU: one fused operator, which keeps no scores for backward."""

from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

DROPOUT = 4  # the position of `dropout_p` among the arguments


class FusedAttention(TorchFunctionMode):
    """Leaves out the dropout of `F.scaled_dot_product_attention`.

    A GPU's fused operator draws its dropout itself. The CPU's has none, and with dropout a CPU computes attention in
    some ten operators, which keep the scores of each pair of positions.
    """

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is F.scaled_dot_product_attention:
            kwargs.pop("dropout_p", None)
            if len(args) > DROPOUT:
                args = (*args[:DROPOUT], 0.0, *args[DROPOUT + 1 :])
        return function(*args, **kwargs)
