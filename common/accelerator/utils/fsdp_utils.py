"""Out of scope here: fully sharded data parallelism.

The names can be imported and compared with; using one raises NotImplementedError.
"""

from ..out_of_scope import out_of_scope

enable_fsdp_ram_efficient_loading = out_of_scope("enable_fsdp_ram_efficient_loading")
disable_fsdp_ram_efficient_loading = out_of_scope("disable_fsdp_ram_efficient_loading")
save_fsdp_model = out_of_scope("save_fsdp_model")
load_fsdp_model = out_of_scope("load_fsdp_model")
save_fsdp_optimizer = out_of_scope("save_fsdp_optimizer")
load_fsdp_optimizer = out_of_scope("load_fsdp_optimizer")
merge_fsdp_weights = out_of_scope("merge_fsdp_weights")
ensure_weights_retied = out_of_scope("ensure_weights_retied")
fsdp2_load_full_state_dict = out_of_scope("fsdp2_load_full_state_dict")
fsdp2_switch_optimizer_parameters = out_of_scope("fsdp2_switch_optimizer_parameters")
fsdp2_apply_ac = out_of_scope("fsdp2_apply_ac")
fsdp2_prepare_model = out_of_scope("fsdp2_prepare_model")
fsdp2_prepare_auto_wrap_policy = out_of_scope("fsdp2_prepare_auto_wrap_policy")
get_fsdp2_grad_scaler = out_of_scope("get_fsdp2_grad_scaler")
fsdp2_canonicalize_names = out_of_scope("fsdp2_canonicalize_names")
get_parameters_from_modules = out_of_scope("get_parameters_from_modules")
