"""Out of scope here: hooks on modules that move weights between devices.

The names can be imported and compared with; using one raises NotImplementedError.
"""

from .out_of_scope import OutOfScope, out_of_scope


class ModelHook(OutOfScope): ...


class SequentialHook(ModelHook): ...


class AlignDevicesHook(ModelHook): ...


class CpuOffload(ModelHook): ...


class UserCpuOffloadHook(OutOfScope): ...


class LayerwiseCastingHook(ModelHook): ...


add_hook_to_module = out_of_scope("add_hook_to_module")
remove_hook_from_module = out_of_scope("remove_hook_from_module")
attach_execution_device_hook = out_of_scope("attach_execution_device_hook")
attach_align_device_hook = out_of_scope("attach_align_device_hook")
remove_hook_from_submodules = out_of_scope("remove_hook_from_submodules")
attach_align_device_hook_on_blocks = out_of_scope("attach_align_device_hook_on_blocks")
