"""Out of scope here: weights in 4 or 8 bits with bitsandbytes.

The names can be imported and compared with; using one raises NotImplementedError.
"""

from typing import Any

from ..out_of_scope import out_of_scope

load_and_quantize_model = out_of_scope("load_and_quantize_model")
get_quantized_model_device_map = out_of_scope("get_quantized_model_device_map")
replace_with_bnb_layers = out_of_scope("replace_with_bnb_layers")
get_keys_to_not_convert = out_of_scope("get_keys_to_not_convert")
get_parameter_device = out_of_scope("get_parameter_device")
quantize_and_offload_8bit = out_of_scope("quantize_and_offload_8bit")


def has_4bit_bnb_layers(model: Any) -> bool:
    """False: no model has such layers here."""
    return False
