"""The launcher's configuration file: `config_args` reads it, `config` writes it."""

from .config_args import ClusterConfig, ConfigError, UnsupportedConfig, default_config_file, load_config_from_file

__all__ = ["ClusterConfig", "ConfigError", "UnsupportedConfig", "default_config_file", "load_config_from_file"]
