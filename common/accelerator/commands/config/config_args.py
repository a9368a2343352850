"""The launcher's configuration file: every key that `accelerate config` writes works, or is refused by name.

Settings that ask for nothing pass: a null port, `deepspeed_config: {}`, `tpu_use_cluster: false`.
"""

import difflib
import os
import reprlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

# Parts of Accelerate that do not exist here; empty, such a key is no request.
OTHER_ENGINES = ("deepspeed_config", "fp8_config", "fsdp_config", "megatron_lm_config", "mpirun_config")
TPU = ("command_file", "commands", "downcast_bf16", "tpu_env", "tpu_name", "tpu_use_cluster", "tpu_use_sudo")
OUT_OF_SCOPE = (*OTHER_ENGINES, *TPU, "parallelism_config", "tpu_vm", "tpu_zone")
# Keys with one meaning here; another value would ask for SageMaker, or for a TPU launch by function name.
FIXED = {"compute_environment": "LOCAL_MACHINE", "main_training_function": "main"}
TUNED_DYNAMO = ("dynamo_mode", "dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation")


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


def shown(value) -> str:
    # YAML aliases can describe a value whose full repr would fill the memory.
    return reprlib.repr(value)


def suggestion(wrong: str, known) -> str:
    near = difflib.get_close_matches(wrong, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _flag(key: str, value) -> bool:
    require(isinstance(value, bool), f"{key} must be true or false, not {shown(value)}")
    return value


def _integer(key: str, value) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    require(isinstance(value, int) and not isinstance(value, bool), f"{key} must be a whole number, not {shown(value)}")
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


def _precision(key: str, value) -> str:
    # YAML reads an unquoted `no` as false.
    return "no" if value is False else _text(key, value).lower()


def _dynamo(key: str, value) -> dict:
    require(isinstance(value, dict), f"{key} must be a mapping, not {shown(value)}")
    for name, setting in value.items():
        _choice(f"{key}: key", name, ("dynamo_backend", *TUNED_DYNAMO))
        asks = name in TUNED_DYNAMO and setting not in (None, False, "default")
        require(not asks, f"{key}: {name} is the script's to choose: only dynamo_backend is taken", UnsupportedConfig)
    backend = _text(f"{key}: dynamo_backend", value.get("dynamo_backend") or "no").upper()
    return {"dynamo_backend": backend} if backend != "NO" else {}


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
    enable_cpu_affinity: bool = False
    dynamo_config: dict = field(default_factory=dict)

    @property
    def on_cpu(self) -> bool:
        return self.use_cpu or self.distributed_type == "MULTI_CPU"

    @property
    def processes_per_machine(self) -> int:
        return self.num_processes // self.num_machines

    def check(self) -> None:
        """Raise ConfigError, or UnsupportedConfig, for a value or a combination that cannot be launched."""
        _choice("distributed_type", self.distributed_type, (None, "NO", "MULTI_CPU", "MULTI_GPU"))
        _choice("mixed_precision", self.mixed_precision, (None, "no", "fp16", "bf16"))
        _choice("rdzv_backend", self.rdzv_backend, ("static", "c10d"))
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
        about_gpus = self.gpu_ids != "all" or self.enable_cpu_affinity
        require(not (self.on_cpu and about_gpus), "gpu_ids and enable_cpu_affinity are about GPUs, this is for the CPU")

    def to_yaml(self) -> str:
        """The file that holds these settings, in the original's keys."""
        import yaml

        settings = {key: value for key, value in asdict(self).items() if value not in (None, {})}
        return yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", **settings}, sort_keys=True)


_BY_TYPE = {bool: _flag, int: _integer, int | None: _integer, str: _text, str | None: _text, dict: _dynamo}
READERS = {each.name: _BY_TYPE[each.type] for each in fields(ClusterConfig)}
READERS |= {"gpu_ids": _device_list, "mixed_precision": _precision}


def _choice(key: str, value, allowed: tuple) -> None:
    known = ", ".join(name for name in allowed if name)
    require(value in allowed, f"{key} {shown(value)} is not supported; it can be {known}", UnsupportedConfig)


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
            _choice(key, value, (FIXED[key],))
        elif value is not None:
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
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError("no such file; `python -m common.accelerator config` writes one") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot be read: {error}") from error
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        settings = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"not valid YAML{line}: {error.problem}") from error
    except Exception as error:  # PyYAML's constructors let KeyError, IndexError, RecursionError … escape.
        raise ConfigError(f"not valid YAML: {type(error).__name__}: {shown(str(error))}") from error
    require(isinstance(settings, dict), f"holds {shown(settings)}, not a mapping of keys to values")
    written = [key.value for key, _ in tree.value]
    for key in settings:
        require(written.count(key) <= 1, f"the key {shown(key)} stands there twice")
    return settings
