"""Out of scope here: the settings of other engines, of fp8, of quantised weights and of torch.distributed's other axes.

The names can be imported and compared with; using one raises NotImplementedError. In the original they are in
`utils/dataclasses.py`, from which a script imports them here too.
"""

import enum

from ..out_of_scope import OutOfScope, out_of_scope


class AORecipeKwargs(OutOfScope): ...


class TERecipeKwargs(OutOfScope): ...


class MSAMPRecipeKwargs(OutOfScope): ...


class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs): ...


class BnbQuantizationConfig(OutOfScope): ...


class DeepSpeedPlugin(OutOfScope): ...


class DeepSpeedSequenceParallelConfig(OutOfScope): ...


class FullyShardedDataParallelPlugin(OutOfScope): ...


class MegatronLMPlugin(OutOfScope): ...


class TorchContextParallelConfig(OutOfScope): ...


class TorchTensorParallelConfig(OutOfScope): ...


class TorchTensorParallelPlugin(OutOfScope): ...


class FP8BackendType(enum.StrEnum):
    """The libraries that compute in fp8."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


class SageMakerDistributedType(enum.StrEnum):
    """The kinds of distributed runs on SageMaker."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class ComputeEnvironment(enum.StrEnum):
    """Where a launch may run; here on machines of one's own only."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class CustomDtype(enum.Enum):
    """Number formats that torch has no dtype for."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


get_module_class_from_name = out_of_scope("get_module_class_from_name")
parse_bert_config = out_of_scope("parse_bert_config")
parse_glm4_moe_config = out_of_scope("parse_glm4_moe_config")
parse_gpt2_config = out_of_scope("parse_gpt2_config")
parse_llama_config = out_of_scope("parse_llama_config")
parse_t5_config = out_of_scope("parse_t5_config")
add_model_config_to_megatron_parser = out_of_scope("add_model_config_to_megatron_parser")
