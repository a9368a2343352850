"""Out of scope here: DeepSpeed.

The names can be imported and compared with; using one raises NotImplementedError.
"""

from typing import Any

from ..out_of_scope import OutOfScope, out_of_scope


class HfDeepSpeedConfig(OutOfScope): ...


class DeepSpeedEngineWrapper(OutOfScope): ...


class DeepSpeedOptimizerWrapper(OutOfScope): ...


class DeepSpeedSchedulerWrapper(OutOfScope): ...


class DummyOptim(OutOfScope): ...


class DummyScheduler(OutOfScope): ...


map_pytorch_optim_to_deepspeed = out_of_scope("map_pytorch_optim_to_deepspeed")


def get_active_deepspeed_plugin(state: Any) -> None:
    """None: there is no such plugin here."""
