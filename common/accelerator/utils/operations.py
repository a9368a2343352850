"""The operations of the core at the path where Accelerate has them."""

from ..operations import *  # noqa: F403
