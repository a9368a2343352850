"""An accelerator core in the shape of Hugging Face Accelerate, written to be read.

Where a comment in this package says "the original", it means Hugging Face Accelerate.
"""

# ruff: noqa: F401

from .accelerator import Accelerator
from .data_loader import skip_first_batches
from .launchers import debug_launcher, notebook_launcher
from .sampler import DistributedEvalSampler
from .state import DistributedType, PartialState
from .utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    find_executable_batch_size,
    load_checkpoint_in_model,
    synchronize_rng_states,
)

# Of the Accelerate whose documented interface this is; scripts compare it.
__version__ = "1.15.0"
