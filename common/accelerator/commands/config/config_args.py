"""The launcher's configuration file: every key that `accelerate config` writes works, or is refused by name.

Settings that ask for nothing pass: a null port, `deepspeed_config: {}`, `tpu_use_cluster: false`.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from reprlib import repr as shown  # YAML aliases can describe a value whose full repr would fill the memory
from typing import Any

from ...state import PRECISIONS
from ...utils.dataclasses import DynamoBackend
from ..utils import suggestion

# Keys of parts of Accelerate that do not exist here, or of what is the script's to choose.
OUT_OF_SCOPE = (
    "command_file",
    "commands",
    "deepspeed_config",
    "downcast_bf16",
    "enable_cpu_affinity",
    "fp8_config",
    "fsdp_config",
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
# The values of such a key that ask for nothing.
EMPTY: tuple = (None, False, "", "no", [], {})
# Keys with one meaning here; another value would ask for SageMaker, or for a TPU launch by function name.
FIXED = {"compute_environment": "LOCAL_MACHINE", "main_training_function": "main"}


class ConfigError(ValueError):
    """A mistake in a configuration, in one line. The reader raises nothing else."""


class UnsupportedConfig(ConfigError, NotImplementedError):
    """The configuration asks for a part of Accelerate that is out of scope here."""


class MissingConfig(ConfigError, FileNotFoundError):
    """There is no configuration file where one was expected."""


def require(condition: object, message: str, error: type[ConfigError] = ConfigError) -> None:
    """Raise `error` with `message` unless `condition` holds."""
    if not condition:
        raise error(message)


def default_config_path() -> Path:
    """The file that `accelerate config` writes, and ours too; read from the environment at each call."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return Path(os.path.expanduser(home), "accelerate", "default_config.yaml")


# The original's names for the same place, as it is when this module is imported.
default_config_file = str(default_config_path())
default_yaml_config_file = default_config_file
default_json_config_file = default_config_file
cache_dir = os.path.dirname(default_config_file)
hf_cache_home = os.path.dirname(cache_dir)


def _read_flag(name: str, value: Any) -> bool:
    require(isinstance(value, bool), f"{name} must be true or false, not {shown(value)}")
    return value


def _read_integer(name: str, value: Any) -> int:
    if isinstance(value, str) and _is_number(value) and len(value) < 10:
        return int(value)
    require(type(value) is int, f"{name} must be a whole number, not {shown(value)}")
    return value


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _read_text(name: str, value: Any) -> str:
    is_text = isinstance(value, str) and value.isprintable()
    require(is_text, f"{name} must be text, not {shown(value)}")
    return value


def _read_device_list(name: str, value: Any) -> str:
    text = str(value) if type(value) in (int, str) else ""
    text = text.replace(" ", "")
    if text != "all":
        numbers = text.split(",")
        distinct = len(set(numbers)) == len(numbers)
        numeric = all(map(_is_number, numbers))
        require(distinct and numeric, f"{name} must be 'all' or distinct device numbers like 0,1, not {shown(value)}")
    return text


def _read_precision(name: str, value: Any) -> str:
    if value is False:  # YAML reads an unquoted `no` as false.
        value = "no"
    return _read_choice(name, value, PRECISIONS)


def _read_distributed_type(name: str, value: Any) -> str:
    return _read_choice(name, value, ("NO", "MULTI_CPU", "MULTI_GPU"))


def _read_rendezvous(name: str, value: Any) -> str:
    return _read_choice(name, value, ("static", "c10d"))


def _read_choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    known = ", ".join(allowed)
    require(value in allowed, f"{name} {shown(value)} is not supported; it can be {known}", UnsupportedConfig)
    return value


def _read_dynamo(name: str, value: Any) -> dict[str, Any]:
    """The settings of `torch.compile`, by their names with `dynamo_`."""
    if value in EMPTY:
        return {}
    require(isinstance(value, dict), f"{name} must be a mapping, not {shown(value)}")
    settings = {}
    for key, setting in value.items():
        full_key = key if str(key).startswith("dynamo_") else f"dynamo_{key}"
        if full_key == "dynamo_use_regional_compilation":
            require(setting in EMPTY, f"{full_key} is out of scope here: leave it empty", UnsupportedConfig)
            continue
        require(full_key in DYNAMO_READERS, f"{name}: unknown key {shown(key)}")
        if setting is not None:
            settings[full_key] = DYNAMO_READERS[full_key](full_key, setting)
    return settings


def _read_dynamo_backend(name: str, value: Any) -> str:
    if value is False:  # YAML reads an unquoted `no` as false.
        value = "no"
    known = [backend.value for backend in DynamoBackend]
    is_known = isinstance(value, str) and value.upper() in known
    require(is_known, f"{name} {shown(value)} is not known; it can be {', '.join(known)}")
    return value.upper()


def _read_dynamo_mode(name: str, value: Any) -> str:
    return _read_choice(name, value, ("default", "reduce-overhead", "max-autotune"))


# How the value of each key is checked. A reader returns the setting, or raises ConfigError with the name of the key.
READERS: dict[str, Callable[[str, Any], Any]] = {
    "debug": _read_flag,
    "distributed_type": _read_distributed_type,
    "dynamo_config": _read_dynamo,
    "gpu_ids": _read_device_list,
    "machine_rank": _read_integer,
    "main_process_ip": _read_text,
    "main_process_port": _read_integer,
    "mixed_precision": _read_precision,
    "num_machines": _read_integer,
    "num_processes": _read_integer,
    "rdzv_backend": _read_rendezvous,
    "same_network": _read_flag,
    "use_cpu": _read_flag,
}

# Those of `dynamo_config`, which are flags of `launch` as well.
DYNAMO_READERS: dict[str, Callable[[str, Any], Any]] = {
    "dynamo_backend": _read_dynamo_backend,
    "dynamo_mode": _read_dynamo_mode,
    "dynamo_use_dynamic": _read_flag,
    "dynamo_use_fullgraph": _read_flag,
}


def read_setting(key: str, value: Any, name: str | None = None) -> Any:
    """The setting that `value` describes; `name` is what a ConfigError calls it, by default its key."""
    read = READERS[key]
    return read(name or key, value)


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
    debug: bool = False
    dynamo_config: dict[str, Any] = field(default_factory=dict)

    @property
    def on_cpu(self) -> bool:
        return self.use_cpu or self.distributed_type == "MULTI_CPU"

    @property
    def processes_per_machine(self) -> int:
        assert self.num_processes is not None, "counted at the launch"
        return self.num_processes // self.num_machines

    def check(self) -> None:
        """Raise ConfigError for a combination that cannot be launched."""
        self._check_machines()
        self._check_processes()
        self._check_devices()

    def _check_machines(self) -> None:
        machines = self.num_machines
        require(machines >= 1, f"num_machines must be at least 1, not {machines}")
        rank = self.machine_rank
        require(0 <= rank < machines, f"machine_rank {rank}: {machines} machines are numbered from 0 to {machines - 1}")
        port = self.main_process_port
        require(port is None or 0 <= port < 2**16, f"main_process_port must be between 0 and 65535, not {port}")
        if machines > 1:
            meeting_point = self.main_process_ip and port
            require(meeting_point, f"{machines} machines need main_process_ip and main_process_port")

    def _check_processes(self) -> None:
        if self.num_processes in (None, -1):
            return  # counted at the launch
        processes = self.num_processes
        machines = self.num_machines
        require(processes >= 1, f"num_processes must be at least 1, not {processes}")
        require(processes % machines == 0, f"num_processes {processes} does not divide by num_machines {machines}")

    def _check_devices(self) -> None:
        if self.distributed_type == "NO":
            processes = self.num_machines if self.num_processes in (None, -1) else self.num_processes
            require(processes == 1, f"distributed_type NO is one process, but num_processes is {processes}")
        if self.distributed_type == "MULTI_GPU":
            require(not self.use_cpu, "use_cpu contradicts distributed_type MULTI_GPU")
        if self.on_cpu:
            require(self.gpu_ids == "all", "gpu_ids are about GPUs, this is for the CPU")

    def to_dict(self) -> dict[str, Any]:
        """The settings that are not open, under the keys of the file."""
        settings = {"compute_environment": "LOCAL_MACHINE"}
        for key, value in asdict(self).items():
            if value not in (None, {}):
                settings[key] = value
        return settings

    def to_yaml(self) -> str:
        """The text of the file that holds these settings."""
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=True)

    def to_json(self) -> str:
        """The same in JSON."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    def write(self, path: str | os.PathLike) -> None:
        """Write the file `path`, JSON where it ends in .json, at once or not at all.

        Raises:
            ConfigError: if the place cannot be written.
        """
        path = Path(path)
        text = self.to_json() if path.suffix == ".json" else self.to_yaml()
        draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def config_from_dict(settings: dict[str, Any]) -> ClusterConfig:
    """The checked configuration. Raises ConfigError for an unknown key or a bad value, UnsupportedConfig for a
    setting that is known and out of scope."""
    config = ClusterConfig()
    for key, value in settings.items():
        _check_key(key)
        if key in OUT_OF_SCOPE:
            require(value in EMPTY, f"{key} is out of scope here: leave it empty", UnsupportedConfig)
        elif value is None:
            continue
        elif key in FIXED:
            _read_choice(key, value, (FIXED[key],))
        else:
            setattr(config, key, read_setting(key, value))
    config.check()
    return config


def _check_key(key: Any) -> None:
    known = [*READERS, *FIXED, *OUT_OF_SCOPE]
    if key not in known:
        name = shown(key)
        meant = suggestion(name.strip("'"), known)
        raise ConfigError(f"unknown key {name}{meant}")


def load_config_from_file(config_file: str | os.PathLike | None = None) -> ClusterConfig:
    """Read `config_file`, YAML or JSON, or the default file where that is None and the file exists.

    Raises ConfigError, which names the file, for whatever is wrong with it.
    """
    if config_file is None:
        config_file = default_config_path()
        if not config_file.is_file():
            return ClusterConfig()
    try:
        settings = _parse(_read_file(config_file))
        require(isinstance(settings, dict), f"holds {shown(settings)}, not a mapping of keys to values")
        return config_from_dict(settings)
    except ConfigError as error:
        raise type(error)(f"{os.fspath(config_file)}: {error}") from error


def _read_file(path: str | os.PathLike) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise MissingConfig("no such file; `python -m common.accelerator config` writes one") from error
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot be read: {error}") from error


def _parse(text: str) -> Any:
    import yaml

    from .strict_yaml import UniqueKeyLoader

    try:
        return yaml.load(text, Loader=UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"not valid YAML{line}: {error.problem}") from error
    except Exception as error:  # PyYAML's constructors let KeyError, IndexError, RecursionError … escape.
        raise ConfigError(f"not valid YAML: {type(error).__name__}: {shown(str(error))}") from error
