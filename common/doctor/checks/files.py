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
    """A Finding if DistributedDataParallel's prefix is left in a state dict of a network that it holds; else Right."""
    saves = [save for record in records for save in record.saves if save.state_dicts]
    if not saves:
        return NotExamined("no state dict went to torch.save")
    of_wrapped = [set(network.shapes) for record in records for network in record.networks if network.wrapped]
    for save in saves:
        for saved_keys in save.state_dicts:
            keys = [key.removeprefix("_orig_mod.") for key in saved_keys]  # torch.compile's
            # An AveragedModel, which keeps a moving average, has the keys `n_averaged` and `module.…`.
            prefix = "module.module." if "n_averaged" in keys else "module."
            prefixed = {key.removeprefix(prefix).removeprefix("_orig_mod.") for key in keys if key.startswith(prefix)}
            if any(wrapped and wrapped <= prefixed for wrapped in of_wrapped):
                return Finding(
                    f"{len(prefixed)} of {len(keys)} keys of a network in {Path(save.path).name} begin with `{prefix}`",
                    "save and average `model.module`; an average of your own may have such keys",
                    pitfall="prefixed_keys",
                )
    return Right()
