"""The launcher's configuration file: every key that `accelerate config` writes works, or is refused by name.

Settings that ask for nothing pass: a null port, `deepspeed_config: {}`, `tpu_use_cluster: false`.
"""

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from reprlib import repr as shown  # YAML aliases can describe a value whose full repr would fill the memory
from typing import Any

from ...state import PRECISIONS
from ..utils import suggestion

# Keys of parts of Accelerate that do not exist here, or of what is the script's to choose.
OUT_OF_SCOPE = (
    "command_file",
    "commands",
    "deepspeed_config",
    "downcast_bf16",
    "dynamo_config",
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
# Those with one meaning here; another value would ask for SageMaker, or for a TPU launch by function name.
FIXED = {"compute_environment": "LOCAL_MACHINE", "main_training_function": "main"}
CHOICES = {
    **{key: (value,) for key, value in FIXED.items()},
    "distributed_type": ("NO", "MULTI_CPU", "MULTI_GPU"),
    "mixed_precision": PRECISIONS,
    "rdzv_backend": ("static", "c10d"),
}
INTEGERS = ("machine_rank", "main_process_port", "num_machines", "num_processes")
FLAGS = ("debug", "same_network", "use_cpu")


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


# The original's name for the same place, as it is when this module is imported.
default_config_file = str(default_config_path())


def read_setting(key: str, value: Any, name: str | None = None) -> Any:
    """The setting that `value` describes.

    Args:
        name: what an error calls it, by default its key.

    Raises:
        ConfigError: for a value of another kind.
        UnsupportedConfig: for a choice that is not offered here.
    """
    name = name or key
    if key == "mixed_precision" and value is False:  # YAML reads an unquoted `no` as false.
        value = "no"
    if key in CHOICES:
        known = ", ".join(CHOICES[key])
        require(value in CHOICES[key], f"{name} {shown(value)} is not supported; it can be {known}", UnsupportedConfig)
        return value
    if key == "gpu_ids":
        return _read_device_list(name, value)
    if key in INTEGERS:
        return _read_integer(name, value)
    if key in FLAGS:
        require(isinstance(value, bool), f"{name} must be true or false, not {shown(value)}")
        return value
    require(isinstance(value, str) and value.isprintable(), f"{name} must be text, not {shown(value)}")
    return value


def _read_integer(name: str, value: Any) -> int:
    if isinstance(value, str) and _is_number(value) and len(value) < 10:
        return int(value)
    require(type(value) is int, f"{name} must be a whole number, not {shown(value)}")
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


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


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
            if value is not None:
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


SETTINGS = tuple(field.name for field in fields(ClusterConfig))


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
            read_setting(key, value)
        else:
            setattr(config, key, read_setting(key, value))
    config.check()
    return config


def _check_key(key: Any) -> None:
    known = [*SETTINGS, *FIXED, *OUT_OF_SCOPE]
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
