"""`Record.saves`: one rank writes each file, with the keys of the bare network."""

from collections import defaultdict
from pathlib import Path

from common.doctor.answers import Answer, Finding, NotExamined, Right
from common.doctor.record import Record


def check_writers(records: list[Record]) -> Answer:
    """Right if one rank writes each file; a Finding if several do."""
    writers: dict[str, list[int]] = defaultdict(list)
    for record in records:
        for save in record.saves:
            writers[save.path].append(record.rank)
    if not writers:
        return NotExamined("no main thread called torch.save with a path")
    for path, ranks in sorted(writers.items()):
        if len(set(ranks)) > 1:
            return Finding(
                f"the file {Path(path).name} is written {len(ranks)} times, by {len(set(ranks))} ranks",
                "let rank 0 write, to another name until the file is complete, and the others wait",
                pitfall="every_rank_saves",
            )
    return Right()


def check_keys(records: list[Record]) -> Answer:
    """Right if the keys are those of the bare network; a Finding if DistributedDataParallel's prefix is left."""
    saves = [save for record in records for save in record.saves if save.state_dicts]
    if not saves:
        return NotExamined("no state dict went to torch.save")
    if any(network.has_module for record in records for network in record.networks):
        return NotExamined("a network has a part that is called `module`")
    for save in saves:
        for saved_keys in save.state_dicts:
            keys = [key.removeprefix("_orig_mod.") for key in saved_keys]  # torch.compile's
            # An AveragedModel, which keeps a moving average, has the keys `n_averaged` and `module.…`.
            prefix = "module.module." if "n_averaged" in keys else "module."
            prefixed = sum(key.startswith(prefix) for key in keys)
            if prefixed:
                return Finding(
                    f"{prefixed} of {len(keys)} keys of a state dict in {Path(save.path).name} begin with `{prefix}`",
                    "save `model.module.state_dict()`, and average `model.module`",
                    pitfall="prefixed_keys",
                )
    return Right()
