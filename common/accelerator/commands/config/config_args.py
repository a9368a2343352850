"""The launcher's configuration file: every key that `accelerate config` writes works, or is refused by name.

Settings that ask for nothing pass: a null port, `deepspeed_config: {}`, `tpu_use_cluster: false`.
"""

import difflib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from reprlib import repr as shown  # YAML aliases can describe a value whose full repr would fill the memory

# Parts of Accelerate that do not exist here, and what is the script's to choose; empty, such a key is no request.
TPU = ("command_file", "commands", "downcast_bf16", "tpu_env", "tpu_name", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm")
ENGINES = tuple(f"{name}_config" for name in ("deepspeed", "dynamo", "fp8", "fsdp", "megatron_lm", "mpirun"))
OUT_OF_SCOPE = (*TPU, *ENGINES, "tpu_zone", "parallelism_config", "enable_cpu_affinity")
# Keys with one meaning here; another value would ask for SageMaker, or for a TPU launch by function name.
FIXED = {"compute_environment": "LOCAL_MACHINE", "main_training_function": "main"}


class ConfigError(ValueError):
    """What is wrong with a configuration, in one line. The reader raises nothing else."""


class UnsupportedConfig(ConfigError, NotImplementedError):
    """The configuration asks for a part of Accelerate that is out of scope here."""


def require(condition: bool, message: str, error: type[ConfigError] = ConfigError) -> None:
    if not condition:
        raise error(message)


def default_config_file() -> Path:
    """Where `accelerate config` keeps its file, and so do we; read from the environment at each call."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return Path(os.path.expanduser(home)) / "accelerate" / "default_config.yaml"


def suggestion(wrong: str, known) -> str:
    near = difflib.get_close_matches(wrong, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _flag(key: str, value) -> bool:
    require(isinstance(value, bool), f"{key} must be true or false, not {shown(value)}")
    return value


def _integer(key: str, value) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    require(type(value) is int, f"{key} must be a whole number, not {shown(value)}")
    return value


def _text(key: str, value) -> str:
    require(isinstance(value, str) and value.isprintable(), f"{key} must be text, not {shown(value)}")
    return value


def _device_list(key: str, value) -> str:
    ids = str(value).replace(" ", "") if type(value) in (int, str) else ""
    numbers = ids.split(",")
    distinct = len(set(numbers)) == len(numbers) and all(number.isascii() and number.isdigit() for number in numbers)
    require(ids == "all" or distinct, f"{key} must be 'all' or distinct device numbers like 0,1, not {shown(value)}")
    return ids


def _one_of(*allowed: str):
    def read(key: str, value) -> str:
        known = ", ".join(allowed)
        require(value in allowed, f"{key} {shown(value)} is not supported; it can be {known}", UnsupportedConfig)
        return value

    return read


READERS = {
    **dict.fromkeys(("debug", "same_network", "use_cpu"), _flag),
    **dict.fromkeys(("machine_rank", "main_process_port", "num_machines", "num_processes"), _integer),
    "distributed_type": _one_of("NO", "MULTI_CPU", "MULTI_GPU"),
    "gpu_ids": _device_list,
    "main_process_ip": _text,
    "mixed_precision": _one_of("no", "fp16", "bf16"),
    "rdzv_backend": _one_of("static", "c10d"),
}


@dataclass
class ClusterConfig:
    """What a launch needs to know; the names are those of the file.

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
        return self.num_processes // self.num_machines

    def check(self) -> None:
        """Raise ConfigError for a combination that cannot be launched."""
        machines, rank, port, kind = self.num_machines, self.machine_rank, self.main_process_port, self.distributed_type
        processes = machines if self.num_processes in (None, -1) else self.num_processes
        require(machines >= 1, f"num_machines must be at least 1, not {machines}")
        require(processes >= 1, f"num_processes must be at least 1, not {processes}")
        require(0 <= rank < machines, f"machine_rank {rank}: {machines} machines are numbered from 0 to {machines - 1}")
        require(port is None or 0 <= port < 2**16, f"main_process_port must be between 0 and 65535, not {port}")
        meeting_point = self.main_process_ip and port
        require(machines == 1 or meeting_point, f"{machines} machines need main_process_ip and main_process_port")
        require(processes % machines == 0, f"num_processes {processes} does not divide by num_machines {machines}")
        require(kind != "NO" or processes == 1, f"distributed_type NO is one process, but num_processes is {processes}")
        require(kind != "MULTI_GPU" or not self.use_cpu, "use_cpu contradicts distributed_type MULTI_GPU")
        require(self.gpu_ids == "all" or not self.on_cpu, "gpu_ids are about GPUs, this is for the CPU")

    def to_yaml(self) -> str:
        """The file that holds these settings, in the original's keys."""
        import yaml

        settings = {key: value for key, value in asdict(self).items() if value is not None}
        return yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", **settings}, sort_keys=True)


def config_from_dict(settings: dict) -> ClusterConfig:
    """The checked configuration. Raises ConfigError for an unknown key or a bad value, UnsupportedConfig for a
    setting that is known and out of scope."""
    config = ClusterConfig()
    known = [*READERS, *FIXED, *OUT_OF_SCOPE]
    for key, value in settings.items():
        require(key in known, f"unknown key {shown(key)}{suggestion(str(shown(key)).strip(chr(39)), known)}")
        if key in OUT_OF_SCOPE:
            empty = value in (None, False, "", "no") or value == [] or value == {}
            require(empty, f"{key} is out of scope here: leave it empty", UnsupportedConfig)
        elif value is not None and key in FIXED:
            _one_of(FIXED[key])(key, value)
        elif value is not None:
            # YAML reads an unquoted `no` as false.
            value = "no" if key == "mixed_precision" and value is False else value
            setattr(config, key, READERS[key](key, value))
    config.check()
    return config


def load_config_from_file(path: str | os.PathLike | None = None) -> ClusterConfig:
    """Read `path`, YAML or JSON, or the default file where that is None and the file exists.

    Raises ConfigError, which names the file, for whatever is wrong with it.
    """
    if path is None:
        path = default_config_file()
        if not path.is_file():
            return ClusterConfig()
    try:
        return config_from_dict(_read_mapping(path))
    except ConfigError as error:
        raise type(error)(f"{os.fspath(path)}: {error}") from error


def _read_mapping(path) -> dict:
    import yaml

    try:
        settings = yaml.safe_load(Path(path).read_text(encoding="utf-8-sig"))
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"not valid YAML{line}: {error.problem}") from error
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot be read: {error}") from error
    except Exception as error:  # PyYAML's constructors let KeyError, IndexError, RecursionError … escape.
        raise ConfigError(f"not valid YAML: {type(error).__name__}: {shown(str(error))}") from error
    require(isinstance(settings, dict), f"holds {shown(settings)}, not a mapping of keys to values")
    return settings
