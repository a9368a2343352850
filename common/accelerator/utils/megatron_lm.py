"""Out of scope here: Megatron-LM.

The names can be imported and compared with; using one raises NotImplementedError.
"""

from ..out_of_scope import OutOfScope, out_of_scope


class MegatronLMDummyDataLoader(OutOfScope): ...


class MegatronLMOptimizerWrapper(OutOfScope): ...


class MegatronLMDummyScheduler(OutOfScope): ...


class MegatronLMSchedulerWrapper(OutOfScope): ...


class AbstractTrainStep(OutOfScope): ...


class BertTrainStep(AbstractTrainStep): ...


class GPTTrainStep(AbstractTrainStep): ...


class T5TrainStep(AbstractTrainStep): ...


class MegatronEngine(OutOfScope): ...


model_provider_func = out_of_scope("model_provider_func")
prepare_model_optimizer_scheduler = out_of_scope("prepare_model_optimizer_scheduler")
prepare_data_loader = out_of_scope("prepare_data_loader")
prepare_optimizer = out_of_scope("prepare_optimizer")
prepare_scheduler = out_of_scope("prepare_scheduler")
finish_mpu_init = out_of_scope("finish_mpu_init")
initialize = out_of_scope("initialize")
avg_losses_across_data_parallel_group = out_of_scope("avg_losses_across_data_parallel_group")
gather_across_data_parallel_groups = out_of_scope("gather_across_data_parallel_groups")
