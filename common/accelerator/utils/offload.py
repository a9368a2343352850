"""Out of scope here: weights that lie on disk.

The names can be imported and compared with; using one raises NotImplementedError.
"""

from ..out_of_scope import OutOfScope, out_of_scope


class PrefixedDataset(OutOfScope): ...


class OffloadedWeightsLoader(OutOfScope): ...


offload_weight = out_of_scope("offload_weight")
load_offloaded_weight = out_of_scope("load_offloaded_weight")
save_offload_index = out_of_scope("save_offload_index")
offload_state_dict = out_of_scope("offload_state_dict")
extract_submodules_state_dict = out_of_scope("extract_submodules_state_dict")
