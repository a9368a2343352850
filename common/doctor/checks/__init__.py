"""The subjects of the doctor, a file each: an observer notes what the script does, and checks compare the ranks' notes.

`loaders` notes what `samples` judges, and `networks` calls `weights` and `random_numbers` around each forward.
`collectives` helps `end`; `epochs`, `alignment` and `contents` help all checks to compare.
"""

from common.doctor.checks import clipping, end, files, optimizers, random_numbers, samples, weights
from common.doctor.checks.collectives import CollectiveObserver
from common.doctor.checks.loaders import LoaderObserver
from common.doctor.checks.networks import NetworkObserver
from common.doctor.record import Record
from common.doctor.recorder import Recorder
from common.doctor.results import Result, Skipped

OF_HEALTH = ("weights", "training samples")  # only if both are right, the report calls a script healthy
END = "end of the script"
# In the order of the report: a cause comes before its consequences.
CHECKS = {
    END: end.check_end,
    "parameters of the optimizer": optimizers.check_parameters,
    "learning rates": optimizers.check_learning_rates,
    "weights": weights.check_same_weights,
    "training samples": samples.check_training_samples,
    "datasets": samples.check_datasets,
    "order of the epochs": samples.check_orders,
    "random numbers": random_numbers.check_draws,
    "schedule": optimizers.check_schedule,
    "clipping": clipping.check_clipping,
    "accumulation": optimizers.check_accumulation,
    "evaluation samples": samples.check_evaluation_samples,
    "BatchNorm's statistics": weights.check_same_statistics,
    "files": files.check_writers,
    "saved keys": files.check_keys,
}
# The pitfalls that no check finds: they leave no trace in a record, or look there like what somebody may want.
ONLY_YOU_CAN_SEE = (
    "batch_size_per_process",
    "forward_outside_no_sync",
    "mean_of_means",
    "metrics_not_gathered",
    "clock_without_wait",
)


def observe(recorder: Recorder, last_step: int | None) -> None:
    """Let all observers note what the script does on this rank, and end it after an optimizer step."""
    loaders = LoaderObserver(recorder)
    networks = NetworkObserver(recorder, loaders)
    loaders.install()
    networks.install()
    optimizers.OptimizerObserver(recorder, networks.networks, last_step).install()
    clipping.ClippingObserver(recorder).install()
    files.observe_saves(recorder)
    CollectiveObserver(recorder).install()
    recorder.start_heartbeat()


def run_all(records: list[Record]) -> dict[str, Result]:
    results: dict[str, Result] = {}
    for topic, check in CHECKS.items():
        try:
            results[topic] = check(records)
        except Exception as error:  # a fault of the doctor: the run was long, and the other checks have their results
            results[topic] = Skipped(f"the check failed: {type(error).__name__}: {error}", failed=True)
    return results
