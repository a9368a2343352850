"""The launcher's configuration file: every key that `accelerate config` writes works, or is refused by name.

A key of the original that is out of scope is accepted if its value changes nothing: `deepspeed_config: {}`,
`tpu_use_cluster: false`.
"""

import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ...state import PRECISIONS

# Keys of the original that are no settings here. Their neutral values change nothing. The original writes the last two
# for `compute_environment` and `main_training_function`.
OUT_OF_SCOPE = (
    "command_file",
    "commands",
    "compute_environment",
    "debug",
    "deepspeed_config",
    "downcast_bf16",
    "dynamo_config",
    "enable_cpu_affinity",
    "fp8_config",
    "main_training_function",
    "megatron_lm_config",
    "mpirun_config",
    "parallelism_config",
    "tpu_env",
    "tpu_name",
    "tpu_use_cluster",
    "tpu_use_sudo",
    "tpu_vm",
    "tpu_zone",
)
NEUTRAL_VALUES: tuple = (None, False, "", "no", [], {}, "LOCAL_MACHINE", "main")
RENDEZVOUS = ("static", "c10d")
CHOICES = {
    "distributed_type": ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP"),
    "mixed_precision": PRECISIONS,
    "rdzv_backend": RENDEZVOUS,
}
# The settings of FSDP, and the variables from which FullyShardedDataParallelPlugin reads them in the script.
FSDP_SETTINGS = {
    "fsdp_version": "FSDP_VERSION",
    "fsdp_reshard_after_forward": "FSDP_RESHARD_AFTER_FORWARD",
    "fsdp_auto_wrap_policy": "FSDP_AUTO_WRAP_POLICY",
    "fsdp_offload_params": "FSDP_OFFLOAD_PARAMS",
    "fsdp_state_dict_type": "FSDP_STATE_DICT_TYPE",
    "fsdp_activation_checkpointing": "FSDP_ACTIVATION_CHECKPOINTING",
    "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "fsdp_min_num_params": "FSDP_MIN_NUM_PARAMS",
    "fsdp_cpu_ram_efficient_loading": "FSDP_CPU_RAM_EFFICIENT_LOADING",
    "fsdp_backward_prefetch": "FSDP_BACKWARD_PREFETCH",
    "fsdp_sync_module_states": "FSDP_SYNC_MODULE_STATES",
    "fsdp_use_orig_params": "FSDP_USE_ORIG_PARAMS",
}
INTEGERS = ("machine_rank", "main_process_port", "num_machines", "num_processes")
FLAGS = ("same_network", "use_cpu")
TEXTS = ("gpu_ids", "main_process_ip")


class ConfigError(ValueError):
    """A mistake in a configuration, described in one line."""


def require(condition: object, message: str) -> None:
    """Raise ConfigError with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def default_config_path() -> Path:
    """The file that `accelerate config` writes, and ours too; read from the environment at each call."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return Path(os.path.expanduser(home), "accelerate", "default_config.yaml")


@dataclass
class ClusterConfig:
    """The settings of a launch; the names are those of the file.

    `num_processes` counts all machines together, -1 stands for "given on the command line". `mixed_precision` None
    leaves the choice to the script. `same_network` needs no action: `main_process_ip` and `main_process_port` are the
    meeting point either way.
    """

    distributed_type: str | None = None
    num_processes: int | None = None
    num_machines: int = 1
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str = "static"
    same_network: bool = True
    gpu_ids: str = "all"
    mixed_precision: str | None = None
    use_cpu: bool = False
    fsdp_config: dict[str, Any] = field(default_factory=dict)

    @property
    def on_cpu(self) -> bool:
        return self.use_cpu or self.distributed_type == "MULTI_CPU"

    @property
    def processes_per_machine(self) -> int:
        assert self.num_processes is not None, "counted at the launch"
        return self.num_processes // self.num_machines

    def check(self) -> None:
        """Raise ConfigError for a combination that cannot be launched."""
        machines = self.num_machines
        require(machines >= 1, f"num_machines must be at least 1, not {machines}")
        rank = self.machine_rank
        require(0 <= rank < machines, f"machine_rank {rank}: {machines} machines are numbered from 0 to {machines - 1}")
        if machines > 1:
            meeting_point = self.main_process_ip and self.main_process_port
            require(meeting_point, f"{machines} machines need main_process_ip and main_process_port")
        if self.num_processes not in (None, -1):
            processes = self.num_processes
            require(processes >= 1, f"num_processes must be at least 1, not {processes}")
            require(processes % machines == 0, f"num_processes {processes} is not divisible by num_machines {machines}")
            is_one = self.distributed_type != "NO" or processes == 1
            require(is_one, f"distributed_type NO is one process, but num_processes is {processes}")
        is_sharded = self.distributed_type == "FSDP"
        require(is_sharded or not self.fsdp_config, "settings of FSDP need distributed_type FSDP, or --use_fsdp")
        if self.use_cpu:
            require(self.distributed_type != "MULTI_GPU", "use_cpu contradicts distributed_type MULTI_GPU")

    def to_yaml_file(self, yaml_file: str | os.PathLike) -> None:
        """Write the settings that are not open; raises ConfigError if the place cannot be written."""
        import yaml

        settings = {"compute_environment": "LOCAL_MACHINE"}
        for key, value in asdict(self).items():
            if value is not None and value != {}:
                settings[key] = value
        path = Path(yaml_file)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(yaml.safe_dump(settings), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


SETTINGS = tuple(setting.name for setting in fields(ClusterConfig))


def load_config_from_file(config_file: str | os.PathLike | None = None) -> ClusterConfig:
    """Read `config_file`, YAML or JSON, or the default file where that is None and the file exists.

    Raises ConfigError, which names the file, for whatever is wrong with it.
    """
    if config_file is None:
        config_file = default_config_path()
        if not config_file.is_file():
            return ClusterConfig()
    import yaml

    try:
        text = Path(config_file).read_text(encoding="utf-8-sig")
        return _config_from_dict(yaml.safe_load(text))
    except (OSError, UnicodeError, yaml.YAMLError, ConfigError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{os.fspath(config_file)}: {reason}") from error


def _config_from_dict(settings: Any) -> ClusterConfig:
    require(isinstance(settings, dict), f"holds {settings!r}, not a mapping of keys to values")
    config = ClusterConfig()
    for key, value in settings.items():
        if key not in SETTINGS:
            require(key in OUT_OF_SCOPE, f"unknown key {key!r}")
            require(value in NEUTRAL_VALUES, f"{key} is out of scope: {value!r}")
        elif value is not None:
            setattr(config, key, _read_value(key, value))
    config.check()
    return config


def _read_value(key: str, value: Any) -> Any:
    if key == "mixed_precision" and value is False:  # YAML reads an unquoted `no` as false.
        value = "no"
    if key in TEXTS:  # YAML reads one device as a number.
        require(isinstance(value, str | int), f"{key} must be a text, not {value!r}")
        value = str(value)
    if key in CHOICES:
        known = ", ".join(CHOICES[key])
        require(value in CHOICES[key], f"{key} {value!r} is not supported; it can be {known}")
    elif key in INTEGERS:
        require(type(value) is int, f"{key} must be a whole number, not {value!r}")
    elif key in FLAGS:
        require(isinstance(value, bool), f"{key} must be true or false, not {value!r}")
    elif key == "fsdp_config":
        value = value or {}
        require(isinstance(value, dict), f"{key} must hold keys and values, not {value!r}")
        for name in value:
            require(name in FSDP_SETTINGS, f"unknown key {name!r} in {key}; version 2 has {', '.join(FSDP_SETTINGS)}")
    return value
