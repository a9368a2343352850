"""The environment variables of the core at the path where Accelerate has them."""

# ruff: noqa: F401

from ..environment import parse_choice_from_env, parse_flag_from_env, patch_environment, str_to_bool
