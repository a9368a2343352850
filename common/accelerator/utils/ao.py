"""Out of scope here: fp8 with torchao.

The names can be imported and compared with; using one raises NotImplementedError.
"""

from typing import Any

from ..out_of_scope import out_of_scope

find_first_last_linear_layers = out_of_scope("find_first_last_linear_layers")
filter_linear_layers = out_of_scope("filter_linear_layers")
filter_first_and_last_linear_layers = out_of_scope("filter_first_and_last_linear_layers")
convert_model_to_fp8_ao = out_of_scope("convert_model_to_fp8_ao")


def has_ao_layers(model: Any) -> bool:
    """False: no model has such layers here."""
    return False
