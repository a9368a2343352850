"""The model inside its wrappers: O for what `torch.compile` returns, and DDP for DistributedDataParallel.

What the two functions return for each order of the wrappers:

    model                         innermost_model    extract_model_from_parallel
    DDP(own)                      own                own
    O(DDP(own)), by `prepare`     own                O(own), or own without `keep_torch_compile`
    DDP(O(own)), by the script    own                O(own)
"""

import sys
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel


def is_compiled_module(module: Any) -> bool:
    """True if `module` is what `torch.compile` returned for a module."""
    # Importing torch._dynamo takes long. Whoever has compiled something has imported it.
    return "torch._dynamo" in sys.modules and isinstance(module, torch._dynamo.eval_frame.OptimizedModule)


def innermost_model(model: Any) -> torch.nn.Module:
    """The model that the script made, for code that needs its modules and parameters themselves. It changes nothing."""
    while True:
        if is_compiled_module(model):
            model = model._orig_mod
        elif isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        else:
            return model


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> torch.nn.Module:
    """The model that a script calls or saves, inside DDP or DataParallel; the same as `Accelerator.unwrap_model`.

    Args:
        model: prepared or not.
        keep_fp32_wrapper: leave the forward as `prepare` made it for mixed precision. Otherwise the model, and with it
            the prepared one, has the script's own forward from then on.
        keep_torch_compile: return a compiled model compiled. It holds the unwrapped model from then on.
    """
    compiled = None
    if is_compiled_module(model):
        compiled = model
        model = model._orig_mod
    while isinstance(model, (DistributedDataParallel, DataParallel)):
        model = model.module
    if not keep_fp32_wrapper:
        original_forward = model.__dict__.pop("_original_forward", None)
        if original_forward is not None:
            model.forward = original_forward
    if compiled is not None and keep_torch_compile:
        compiled._orig_mod = model
        return compiled
    return model
