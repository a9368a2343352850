"""Out of scope here: pipeline parallelism for inference.

The names can be imported and compared with; using one raises NotImplementedError.
"""

from .out_of_scope import out_of_scope

generate_device_map = out_of_scope("generate_device_map")
find_pippy_batch_size = out_of_scope("find_pippy_batch_size")
build_pipeline = out_of_scope("build_pipeline")
pippy_forward = out_of_scope("pippy_forward")
prepare_pippy = out_of_scope("prepare_pippy")
