"""The operations of the core at the path where Accelerate has them."""

# ruff: noqa: F401

from common.nested import honor_type, is_namedtuple

from ..exchange import DistributedOperationException
from ..metrics import gather_for_metrics
from ..operations import (
    ConvertOutputsToFp32,
    broadcast,
    broadcast_object_list,
    concatenate,
    convert_outputs_to_fp32,
    convert_to_fp32,
    find_batch_size,
    gather,
    gather_object,
    is_torch_tensor,
    listify,
    pad_across_processes,
    recursively_apply,
    reduce,
    send_to_device,
)
