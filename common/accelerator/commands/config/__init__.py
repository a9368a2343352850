"""The launcher's configuration file: `config_args` reads it, `config` writes it."""

# ruff: noqa: F401

from .config_args import ClusterConfig, ConfigError, UnsupportedConfig, default_config_file, load_config_from_file
