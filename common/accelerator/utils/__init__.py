"""Helpers that a training script may need besides the Accelerator."""

# ruff: noqa: F401

from ..commands.config.default import write_basic_config  # commands/config imports nothing of this folder
from .constants import SAFE_WEIGHTS_NAME, SCALER_NAME, WEIGHTS_NAME
from .dataclasses import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    LoggerType,
    PrecisionType,
    ProfileKwargs,
    ProjectConfiguration,
    RNGType,
    TorchDynamoPlugin,
)
from .environment import parse_choice_from_env, parse_flag_from_env, patch_environment, str_to_bool
from .imports import (
    compare_versions,
    is_bf16_available,
    is_cuda_available,
    is_deepspeed_available,
    is_fp16_available,
    is_npu_available,
    is_peft_available,
    is_tensorboard_available,
    is_torch_version,
    is_wandb_available,
    is_xpu_available,
)
from .memory import clear_device_cache, find_executable_batch_size, release_memory, should_reduce_batch_size
from .modeling import is_peft_model, load_checkpoint_in_model, load_state_dict
from .operations import (
    broadcast,
    broadcast_object_list,
    concatenate,
    convert_outputs_to_fp32,
    convert_to_fp32,
    find_batch_size,
    gather,
    gather_for_metrics,
    gather_object,
    honor_type,
    is_namedtuple,
    is_torch_tensor,
    listify,
    pad_across_processes,
    recursively_apply,
    reduce,
    send_to_device,
)
from .other import extract_model_from_parallel, is_compiled_module, is_port_in_use, load, save, wait_for_everyone
from .random import set_seed, synchronize_rng_state, synchronize_rng_states
from .tqdm import tqdm
from .weights import clean_state_dict_for_safetensors
