"""Print what a bug report needs: versions, hardware, the launcher's configuration, the variables that matter."""

import os

from .config import ConfigError, default_config_file, load_config_from_file

PREFIXES = ("ACCELERATE_", "CUDA_", "GLOO_", "MASTER_", "NCCL_", "OMP_", "TORCH")
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "HF_HOME", "XDG_CACHE_HOME")


def add_arguments(parser) -> None:
    parser.add_argument("--config_file", help="report this file instead of the default one")


def run(args) -> int:
    from torch.utils.collect_env import get_pretty_env_info

    print(get_pretty_env_info())
    print("Environment:")
    for name, value in sorted(os.environ.items()):
        if name.startswith(PREFIXES) or name in NAMES:
            print(f"    {name}={value}")
    path = args.config_file or default_config_file()
    print(f"Configuration {path}:")
    try:
        print(load_config_from_file(path).to_yaml())
    except ConfigError as error:  # what the report may well be about
        print(f"    cannot be used: {error}")
    return 0
