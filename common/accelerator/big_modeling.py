"""Out of scope here: models that are larger than one device, loaded and run in parts.

The names can be imported and compared with; using one raises NotImplementedError.
"""

from .out_of_scope import out_of_scope

init_empty_weights = out_of_scope("init_empty_weights")
init_on_device = out_of_scope("init_on_device")
cpu_offload = out_of_scope("cpu_offload")
cpu_offload_with_hook = out_of_scope("cpu_offload_with_hook")
disk_offload = out_of_scope("disk_offload")
dispatch_model = out_of_scope("dispatch_model")
load_checkpoint_and_dispatch = out_of_scope("load_checkpoint_and_dispatch")
attach_layerwise_casting_hooks = out_of_scope("attach_layerwise_casting_hooks")
