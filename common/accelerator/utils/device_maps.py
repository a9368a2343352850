"""Out of scope here: models that are spread over several devices, or partly lie on disk.

The names can be imported and compared with; using one raises NotImplementedError. What a script may ask of any model
has its answer. In the original all this is in `utils/modeling.py`, from which a script imports it here too.
"""

import sys

import torch

from ..out_of_scope import out_of_scope
from .other import extract_model_from_parallel

align_module_device = out_of_scope("align_module_device")
calculate_maximum_sizes = out_of_scope("calculate_maximum_sizes")
check_device_map = out_of_scope("check_device_map")
check_device_same = out_of_scope("check_device_same")
check_tied_parameters_in_config = out_of_scope("check_tied_parameters_in_config")
check_tied_parameters_on_same_device = out_of_scope("check_tied_parameters_on_same_device")
clean_device_map = out_of_scope("clean_device_map")
compute_module_sizes = out_of_scope("compute_module_sizes")
compute_module_total_buffer_size = out_of_scope("compute_module_total_buffer_size")
fallback_allocate = out_of_scope("fallback_allocate")
find_tied_parameters = out_of_scope("find_tied_parameters")
get_balanced_memory = out_of_scope("get_balanced_memory")
get_grad_scaler = out_of_scope("get_grad_scaler")
get_max_layer_size = out_of_scope("get_max_layer_size")
get_max_memory = out_of_scope("get_max_memory")
get_mixed_precision_context_manager = out_of_scope("get_mixed_precision_context_manager")
get_module_leaves = out_of_scope("get_module_leaves")
get_module_size_with_ties = out_of_scope("get_module_size_with_ties")
get_non_persistent_buffers = out_of_scope("get_non_persistent_buffers")
get_state_dict_from_offload = out_of_scope("get_state_dict_from_offload")
get_state_dict_offloaded_model = out_of_scope("get_state_dict_offloaded_model")
infer_auto_device_map = out_of_scope("infer_auto_device_map")
load_offloaded_weights = out_of_scope("load_offloaded_weights")
named_module_tensors = out_of_scope("named_module_tensors")
retie_parameters = out_of_scope("retie_parameters")
set_module_tensor_to_device = out_of_scope("set_module_tensor_to_device")


def has_offloaded_params(module: torch.nn.Module) -> bool:
    """False: no weights of a model lie elsewhere here."""
    return False


def is_peft_model(model: torch.nn.Module) -> bool:
    """Whether the library PEFT made the model."""
    peft = sys.modules.get("peft")
    if peft is None:  # whoever has such a model has imported it
        return False
    return isinstance(extract_model_from_parallel(model), peft.PeftModel)


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Device, address and size in bytes of a tensor's storage: equal for tensors that share it."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def dtype_byte_size(dtype: torch.dtype) -> int | float:
    """Bytes of a number of this type; a truth value counts as one bit."""
    return 1 / 8 if dtype == torch.bool else dtype.itemsize
