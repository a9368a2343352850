"""Out of scope here: fp8 with Transformer Engine.

The names can be imported and compared with; using one raises NotImplementedError.
"""

from typing import Any

from ..out_of_scope import out_of_scope

convert_model = out_of_scope("convert_model")
contextual_fp8_autocast = out_of_scope("contextual_fp8_autocast")
apply_fp8_autowrap = out_of_scope("apply_fp8_autowrap")


def has_transformer_engine_layers(model: Any) -> bool:
    """False: no model has such layers here."""
    return False
