"""What a training script may need besides the Accelerator."""

from ..commands.config.config import write_basic_config  # noqa: F401
from .dataclasses import *  # noqa: F403
from .environment import *  # noqa: F403
from .memory import *  # noqa: F403
from .operations import *  # noqa: F403
from .random import *  # noqa: F403
