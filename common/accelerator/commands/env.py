"""Print what a bug report needs: versions, hardware, the launcher's configuration, the variables that matter."""

import importlib.metadata
import os
import platform

from .config import ConfigError, default_config_file, load_config_from_file

PACKAGES = ("numpy", "torchvision", "safetensors", "pyyaml", "accelerate", "tensorboard", "swanlab")
PREFIXES = ("ACCELERATE_", "CUDA_", "GLOO_", "MASTER_", "NCCL_", "OMP_", "TORCH")
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "HF_HOME", "XDG_CACHE_HOME")


def add_arguments(parser) -> None:
    parser.add_argument("--config_file", help="report this file instead of the default one")


def run(args) -> int:
    import torch

    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    backends = [name for name in ("gloo", "nccl", "mpi") if torch.distributed.is_backend_available(name)]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    print(f"- Platform: {platform.platform()}")
    print(f"- Python: {platform.python_version()}")
    print(f"- PyTorch: {torch.__version__} (CUDA {torch.version.cuda or 'none'}), backends {', '.join(backends)}")
    print(f"- GPUs: {', '.join(devices) or 'none'}")
    print(f"- CPU: {os.cpu_count()} cores, {torch.get_num_threads()} threads, {memory:.1f} GiB RAM")
    print(f"- Packages: {', '.join(f'{name} {version}' for name in PACKAGES if (version := _version(name)))}")
    print("- Environment:")
    for name, value in sorted(os.environ.items()):
        if name.startswith(PREFIXES) or name in NAMES:
            print(f"    {name}={value}")
    path = args.config_file or default_config_file()
    print(f"- Configuration {path}:")
    try:
        lines = load_config_from_file(path).to_yaml().splitlines()
    except ConfigError as error:  # What the report may well be about.
        lines = [f"cannot be used: {error}"]
    print(*(f"    {line}" for line in lines), sep="\n")
    return 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
