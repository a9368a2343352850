"""Names of the original that are out of scope: asking for one of them is an error of one line."""

import re
from collections.abc import Callable
from typing import NoReturn

# Each topic, and the words by which the names of it are known.
TOPICS = {
    "DeepSpeed": r"deepspeed|^Dummy(Optim|Scheduler)$|^GatheredParameters$",
    "fully sharded data parallelism": r"fsdp|FullySharded|weights_retied",
    "Megatron-LM": r"megatron|TrainStep$|^avg_losses_across",
    "tensor, context and sequence parallelism": r"^Torch(Tensor|Context)Parallel|^ParallelismConfig$|dtensor|_tp_size$",
    "pipeline parallelism": r"pippy",
    "models that are spread over devices or lie on disk": (
        r"offload|device_map|dispatch_model|and_dispatch|empty_weights|init_on_device|PrefixedDataset|submodules_state|"
        r"align_module_device|calculate_maximum_sizes|compute_module_sizes|tied_parameters|get_balanced_memory|"
        r"max_layer_size|max_memory|named_module_tensors|retie_parameters|set_module_tensor|id_tensor_storage|dtype_byte"
    ),
    "fp8": r"fp8|TERecipe|AORecipe|MSAMP|transformer_engine|torchao|ao_layers|linear_layers$|^convert_model$",
    "weights in 4 and 8 bits": r"bnb|bitsandbytes|quantiz|^CustomDtype$",
    "the optimizers of LOMO": r"lomo",
    "regional compilation": r"compile(d)?_regions",
    "accelerators other than NVIDIA's, AMD's and Apple's": (
        r"^is_(amdsmi|habana|hpu|mlu|musa|neuron|npu|sdaa|torch_xla|xccl|xpu)|install_xla|tpu"
    ),
    "binding processes to cores": r"numa_affinity",
    "SageMaker": r"sagemaker|sagemager|boto3|^ComputeEnvironment$",
    "trackers other than TensorBoard, Weights & Biases, SwanLab and JSON lines": (
        r"^(Aim|ClearML|CometML|DVCLive|MLflow|Trackio)Tracker$"
    ),
}


def topic_of(name: str) -> str | None:
    """The topic that `name` belongs to, or None for a name that is not out of scope."""
    for topic, words in TOPICS.items():
        if re.search(words, name, re.IGNORECASE):
            return topic
    return None


def refusal(name: str, topic: str) -> str:
    """The line that somebody reads who asks for `name`."""
    return f"{name} is out of scope here ({topic}): this core does data parallelism; Hugging Face Accelerate has it"


def refuse_names_out_of_scope(module: str) -> Callable[[str], NoReturn]:
    """The `__getattr__` of `module`: Python calls it for a name that the module does not define.

    Raises:
        ImportError: for a name that is out of scope.
        AttributeError: for any other name.
    """

    def __getattr__(name: str) -> NoReturn:
        topic = topic_of(name)
        if topic is not None and not name.startswith("_"):
            raise ImportError(refusal(name, topic))
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__
