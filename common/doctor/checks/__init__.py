"""The checks: each compares the records of all ranks in one respect, and gives an Answer."""

from common.doctor.answers import Answer, NotExamined
from common.doctor.checks import data_sets, evaluations, files, optimizers, random_numbers, replicas, samples, steps
from common.doctor.checks.end import check_end
from common.doctor.record import Record
from common.doctor.run_script import OWN_PROCESSES

OF_HEALTH = ("weights", "training samples")  # only if both are right, the report calls a script healthy
END = "end of the script"
# In the order of the report: a cause comes before its consequences.
CHECKS = {
    END: check_end,
    "parameters of the optimizer": optimizers.check_parameters,
    "learning rates": steps.check_learning_rates,
    "weights": replicas.check_same_weights,
    "training samples": samples.check_training_samples,
    "data sets": data_sets.check_data_sets,
    "order of the epochs": samples.check_orders,
    "random numbers": random_numbers.check_draws,
    "schedule": steps.check_schedule,
    "clipping": steps.check_clipping,
    "accumulation": steps.check_accumulation,
    "evaluation samples": evaluations.check_evaluation_samples,
    "BatchNorm's statistics": replicas.check_same_statistics,
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


def ask_all(records: list[Record]) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    for topic, check in CHECKS.items():
        try:
            answers[topic] = check(records)
        except Exception as error:  # a fault of the doctor: the run was long, and the other checks have their answers
            answers[topic] = NotExamined(f"the check failed: {type(error).__name__}: {error}", failed=True)
    return answers


def why_nothing_was_examined(records: list[Record]) -> str | None:
    """The reason, if the script starts its own processes, or if there were neither ranks to compare nor a bad end."""
    if any(OWN_PROCESSES in record.end.text for record in records):
        return OWN_PROCESSES
    if any(record.backend or record.end.reason in ("crash", "lost", "stopped") for record in records):
        return None
    printed = records[0].last_printed or "nothing"
    return f"the script made no process group, so each process was on its own; it printed last: {printed}"
