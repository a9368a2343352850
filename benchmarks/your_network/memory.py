"""Question 1: what would each strategy need on each device, and which batch fits?

A step is run on tensors without memory (see `hollow`), and every storage is charged to its device (`common.memory`).
"""

import argparse
import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from textwrap import fill, shorten
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.harness.fused_attention import FusedAttention
from benchmarks.harness.hollow import DependsOnNumbers, hollow
from benchmarks.your_network import answers, strategies, training
from benchmarks.your_network.spec import UserNetwork
from benchmarks.your_network.strategies import Strategy
from benchmarks.your_network.training import StepFailed, TooLarge
from common.errors import fail
from common.memory import CATEGORIES, accounting, name_category

STEPS = 3  # the optimizer's state is there from the second on, DDP's final buckets only in the third
STEPS_OF_ONE_PROCESS = 2
PRECISIONS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
GIB = 2**30
LARGE = 256  # samples: enough for activations to decide about the peak
STRAIGHT = 0.001  # of a peak: how far it may be from a straight line, as blocks of 512 bytes are whole
TRIES = 20  # batches that are run, at most, to find the largest one for one size: 4 ** 20 times the first one
CLOSE = 1.05  # times a batch that fits: a larger one that might fit is not sought, nor is it advised
GROWTH = 16  # times the largest batch that was run: no line is trusted beyond it


def answer(options: argparse.Namespace) -> None:
    for devices in options.devices:
        if options.batch % devices:
            fail(f"argument --batch: {options.batch} samples cannot be divided among {devices} devices")
    network = answers.network(options)
    counts = sorted(set(options.devices))
    total = sum(len(strategies.on(devices)) for devices in counts)
    with tqdm(total=total, leave=False, disable=None) as bar:
        setting = (options.precision, options.checkpointing, sorted(set(options.gib)))
        found = list(rows(network, options.batch, counts, *setting, bar))
    print(f"{network.title}, global batch {options.batch}, mixed precision: {options.precision}")
    answers.print_assumption(network)
    print()
    print(table(found))
    answers.conclude(options, verdict(found, sorted(set(options.gib))), {"memory": found})


@dataclass(frozen=True)
class Setting:
    """A way to train a network.

    Attributes:
        strategy: one of `strategies`.
        devices: how many.
        precision: a key of PRECISIONS.
        checkpointing: whether units keep their inputs only, and compute again in backward.
        rank: whose need is asked for.
    """

    strategy: Strategy
    devices: int
    precision: str = "no"
    checkpointing: bool = False
    rank: int = 0


@dataclass(frozen=True)
class Need:
    """The bytes of each device at its peak.

    Attributes:
        devices: by category. Where every device has a process of its own this is one entry: that of the rank that needs
            most. They are alike but for ZeRO-1, whose optimizer takes parameters as wholes.
        computed: whether the step was computed, because the network's shapes depend on numbers.
    """

    devices: tuple[dict[str, int], ...]
    computed: bool = False

    @property
    def peaks(self) -> list[int]:
        return [sum(split.values()) for split in self.devices]

    @property
    def most(self) -> int:
        return max(self.peaks)


def need(network: UserNetwork, setting: Setting, batch: int, computes: bool = False) -> Need:
    """The bytes that a step of a global `batch` needs.

    Args:
        computes: compute the step, in real memory.

    Raises:
        StepFailed: if the network, its batch or its loss does not work, or the strategy cannot take them.
    """
    if not computes:
        try:
            return need_without_computing(network, setting, batch)
        except DependsOnNumbers:
            pass
    return _run(network, setting, batch, contextlib.nullcontext(), computed=True)


def need_without_computing(network: UserNetwork, setting: Setting, batch: int) -> Need:
    """The same. DependsOnNumbers is raised where the network's shapes depend on numbers."""
    return _run(network, setting, batch, hollow())


def _run(network: UserNetwork, setting: Setting, batch: int, mode, computed: bool = False) -> Need:
    with strategies.lone_rank(setting.rank, setting.devices) as mesh, mode, accounting() as ledger:
        train(network, setting, mesh, setting.strategy.batch_of_process(batch, setting.devices))
    gc.collect()  # a wrapper's cycles keep the network alive
    return Need(tuple(ledger.peaks().values()), computed)


def of_fullest_rank(network: UserNetwork, setting: Setting, batch: int) -> tuple[Setting, Need]:
    """The need of the rank that needs most, and the setting with that rank. Only under ZeRO-1 do ranks differ."""
    if not setting.strategy.shard_optimizer:
        return setting, need(network, setting, batch)
    of_ranks = [replace(setting, rank=rank) for rank in range(setting.devices)]
    needs = [need(network, of_rank, batch) for of_rank in of_ranks]
    return max(zip(of_ranks, needs, strict=True), key=lambda pair: pair[1].most)


def check_alone(network: UserNetwork, setting: Setting, batch: int) -> None:
    """Raises StepFailed if the network fails on one device too. Else what failed was the setting's strategy."""
    need(network, replace(setting, strategy=strategies.ONE_DEVICE, devices=1, rank=0), batch)


def train(network: UserNetwork, setting: Setting, mesh, batch: int) -> None:
    """A few steps of one process, with `batch` samples each."""
    if setting.strategy.cuts_inputs and network.shared:
        reason = "it would cut an input that all samples share; as a buffer of the module it stays whole"
        raise StepFailed(f"{setting.strategy.name} cannot train {network.title}", reason)
    model = training.build(network)
    if setting.checkpointing:
        model = strategies.checkpointed(model)
    with training.explained(f"{setting.strategy.name} cannot wrap {network.title}"):
        model = setting.strategy.wrap(model, mesh)
    for name, parameter in model.named_parameters():
        name_category(parameter, "parameters", name.removeprefix("module."))
    optimizer = strategies.make_optimizer(network, model, setting.strategy.shard_optimizer)
    for _ in range(STEPS_OF_ONE_PROCESS if setting.strategy.one_process else STEPS):
        samples = training.make_batch(network, batch)
        with FusedAttention():
            loss = training.loss_of(network, model, samples, PRECISIONS[setting.precision])
            training.backward(network, loss)  # checkpointed units run their forward again
        training.update(network, optimizer)
        optimizer.zero_grad()


def largest_batches(network: UserNetwork, setting: Setting, sizes: Sequence[int]) -> dict[int, int | str]:
    """The largest global batch for each size of a device in GiB, see `largest_batch`, or why none can be told.

    The largest size and the smallest come first. What was run for them decides about the ones between.
    """
    try:
        known = {batch: need_without_computing(network, setting, batch).most for batch in (LARGE, 2 * LARGE)}
    except StepFailed as error:
        return dict.fromkeys(sizes, str(error))
    found: dict[int, int | str] = {}
    for size in (sizes[-1], sizes[0], *sizes[1:-1]):
        try:
            found[size] = largest_batch(network, setting, size * GIB, known)
        except StepFailed as error:
            found[size] = str(error)
    return _never_less(found)


def _never_less(found: dict[int, int | str]) -> dict[int, int | str]:
    """The same by ascending sizes: what a GPU holds, a larger one holds too."""
    most = 0
    ascending: dict[int, int | str] = {}
    for size in sorted(found):
        batch = found[size]
        if isinstance(batch, int):
            most = max(most, batch)
            batch = most
        ascending[size] = batch
    return ascending


def largest_batch(network: UserNetwork, setting: Setting, limit: int, known: dict[int, int]) -> int:
    """The largest global batch whose peak is at most `limit` bytes; 0 where not even two samples a device fit.

    In large batches activations are what grows, so a peak follows from two others by a straight line. The batch that
    the line promises is run, and only one that has been seen to fit is returned, unless it lies between batches that
    were run and `_is_settled`. Where a peak grows faster than by a line, as with a score for each pair of samples, the
    batch that is returned fits too, but a somewhat larger one may.

    Args:
        known: peaks of two large batches, and of others that were seen; what is seen here is added.

    Raises:
        StepFailed: if a step with one of these batches fails, or none is seen that does not fit.
    """
    refused: int | None = None
    smallest = 2 * setting.devices  # a batch normalisation needs two samples
    bound = GROWTH * max(known)
    guess = _on_the_line(known, limit, setting.devices)
    for _ in range(TRIES):
        is_bounded = guess > bound
        guess = max(smallest, min(guess, bound) // setting.devices * setting.devices)
        if guess not in known:
            if _is_settled(known, guess):
                return guess
            guess = _between_far_neighbours(known, guess, setting.devices)
            try:
                known[guess] = need_without_computing(network, setting, guess).most
            except TooLarge:
                refused = guess
                bound = guess // 2
                if bound <= max(known):  # what is left between the two is not worth a search
                    break
                continue
        line = _on_the_line(known, limit, setting.devices)
        if known[guess] <= limit and not is_bounded and line <= CLOSE * guess:
            return guess
        if known[guess] > limit and guess == smallest:
            return 0
        if known[guess] > limit:
            guess = min(line, guess - setting.devices)
        else:
            bound = GROWTH * guess
            guess = line
    return _largest_that_was_run(known, limit, refused)


def _largest_that_was_run(known: dict[int, int], limit: int, refused: int | None) -> int:
    """The largest known batch that fits. StepFailed is raised if none is too large: a larger one may fit."""
    most = max((batch for batch in known if known[batch] <= limit), default=0)
    if max(known.values()) > limit:
        return most
    why = f"none of {TRIES} batches was too large"
    if refused is not None:
        why = f"this machine refuses the tensors of batch {refused}"
    raise StepFailed(f"at least {most}", why)


def _between_far_neighbours(known: dict[int, int], guess: int, devices: int) -> int:
    """The guess, or the geometric mean of its neighbours where these are too far apart for a line between them."""
    below = max((batch for batch in known if batch < guess), default=guess)
    above = min((batch for batch in known if batch > guess), default=guess)
    if above <= 4 * below:
        return guess
    return int((below * above) ** 0.5) // devices * devices


def _on_the_line(known: dict[int, int], limit: int, devices: int) -> int:
    """The batch with a peak of `limit`, by two known ones; a multiple of `devices`.

    They are the ones around it if there are such, else the two that are nearest to it.
    """
    below = [batch for batch in known if known[batch] <= limit]
    above = [batch for batch in known if known[batch] > limit]
    if below and above:
        near, other = max(below), min(above)
    else:
        nearest_first = sorted(known, key=lambda batch: abs(known[batch] - limit))
        near, other = nearest_first[:2]
    bytes_per_sample = (known[near] - known[other]) / (near - other)
    if bytes_per_sample <= 0:  # the peak is the optimizer's: it does not depend on so small a batch
        return 2 * GROWTH * max(known)
    batch = near + (limit - known[near]) / bytes_per_sample
    return int(batch) // devices * devices


def _is_settled(known: dict[int, int], batch: int) -> bool:
    """True where the batch lies between two that were run, and a third one is on their straight line.

    What a step holds at one moment grows with the batch by a straight line, or faster. A peak is the largest of all
    moments, so it is a convex function of the batch: between two batches it is at most the line through them, and at
    least the line through one of them and a third one beyond it.
    """
    below = [other for other in known if other < batch]
    above = [other for other in known if other > batch]
    if not below or not above or len(known) < 3:
        return False
    left, right = max(below), min(above)
    bytes_per_sample = (known[right] - known[left]) / (right - left)
    for third in known.keys() - {left, right}:
        on_the_line = known[left] + (third - left) * bytes_per_sample
        if abs(known[third] - on_the_line) <= STRAIGHT * known[third]:
            return True
    return False


def rows(
    network: UserNetwork,
    batch: int,
    counts: list[int],
    precision: str,
    checkpointing: bool,
    sizes: Sequence[int],
    bar: tqdm,
) -> Iterator[dict]:
    """A row for each strategy and number of devices: the need of each device by category, and the batches that fit.

    A strategy that cannot train this network has a row that says why. If one device fails too, it raises StepFailed.

    Args:
        batch: the global one of the needs.
        counts: numbers of devices.
        precision, checkpointing: see Setting.
        sizes: GiB of each device, for which the largest batch is sought.
        bar: goes on by 1 with each row.
    """
    for devices in counts:
        for strategy in strategies.on(devices):
            yield _row(network, Setting(strategy, devices, precision, checkpointing), batch, sizes)
            bar.update()


def _row(network: UserNetwork, setting: Setting, batch: int, sizes: Sequence[int]) -> dict:
    row: dict[str, Any] = {
        "strategy": setting.strategy.name,
        "devices": setting.devices,
        "batch": batch,
        "cannot": None,
        "peaks": [],
        "computed": False,
        "largest_batch": None,
    }
    try:
        setting, found = of_fullest_rank(network, setting, batch)
    except StepFailed as error:
        check_alone(network, setting, batch)
        row["cannot"] = {"what": error.what, "reason": error.reason}
        return row
    row["peaks"] = list(found.devices)
    row["computed"] = found.computed
    if found.computed:
        return row
    try:
        row["largest_batch"] = largest_batches(network, setting, sizes)
    except DependsOnNumbers:  # with more samples than were asked for; a search must not compute
        row["computed"] = True
    return row


def table(found: list[dict]) -> str:
    """The rows in 80 columns: MiB of the fullest device by category, of the emptiest, and the largest batches."""
    heads = ("weights", "grads", "optim.", "acts.", "comm.", "temp.", "peak", "least")
    lines = [
        "MiB at the peak of a step on the device that needs most. weights: parameters, the",
        "gathered ones too; optim.: the optimizer's state; acts.: activations, which",
        "forward keeps for backward; comm.: DDP's buckets, DataParallel's copies, messages;",
        "temp.: what an operation needs for a moment; least: the device that needs least.",
        "",
        f"{'on devices':<20}" + "".join(f"{head:>7}" for head in heads[:-2]) + "".join(f"{h:>8}" for h in heads[-2:]),
    ]
    for row in found:
        if row["cannot"]:
            lines.append(f"{_label(row):<20}" + shorten(f"cannot: {row['cannot']['reason']}", 60, placeholder=" …"))
            continue
        fullest = max(row["peaks"], key=_sum)
        cells = [_mib(fullest[category], 7) for category in CATEGORIES]
        cells += [_mib(_sum(fullest), 8), _mib(min(map(_sum, row["peaks"])), 8)]
        lines.append(f"{_label(row):<20}" + "".join(cells))
    if any(row["strategy"] == strategies.ZERO_1.name for row in found):
        lines.append("ZeRO-1 shares out whole parameters: the state of a large one is on one device.")
    if any(row["computed"] for row in found):
        lines += [
            "",
            "This network's shapes depend on numbers, so the steps were computed, and no",
            "largest batch is sought.",
            *_failures(found),
        ]
        return "\n".join(lines)
    with_batches = [row for row in found if row["largest_batch"]]
    if with_batches:
        sizes = with_batches[0]["largest_batch"]
        lines += ["", "The largest global batch if each device has so much memory (–: none):", ""]
        lines.append(f"{'on devices':<20}" + "".join(f"{size:>8} GiB" for size in sizes))
    for row in with_batches:
        batches = "".join(f"{_batch_cell(batch):>12}" for batch in row["largest_batch"].values())
        lines.append(f"{_label(row):<20}" + batches)
    lines += _failures(found)
    lines += [
        "",
        "Not counted: the CUDA context (some 0.5 GiB), workspaces of cuBLAS and cuDNN,",
        "NCCL's buffers, fragmentation.",
    ]
    return "\n".join(lines)


def _batch_cell(batch: int | str) -> str:
    if isinstance(batch, str):
        return "?"
    return str(batch or "–")


def _failures(found: list[dict]) -> list[str]:
    """What each strategy cannot do, and why, for the first number of devices where it cannot."""
    texts: dict[str, str] = {}
    for row in found:
        name = row["strategy"]
        if row["cannot"]:
            texts.setdefault(name, "{}: {what}: {reason}".format(_label(row), **row["cannot"]))
        for size, batch in (row["largest_batch"] or {}).items():
            if isinstance(batch, str):
                texts.setdefault(name, f"{_label(row)}, ? for {size} GiB: {batch}")
    lines = [fill(text, 80) for text in texts.values()]
    if any(row["cannot"] and row["strategy"] == strategies.DATA_PARALLEL.name for row in found):
        note = "DataParallel cuts all inputs, and joins all outputs, along their first dimension."
        lines.append(fill(f"{note} What is computed from pairs of samples has pairs within a device's part only.", 80))
    return ["", *lines] if lines else []


def _label(row: dict) -> str:
    return row["strategy"] if row["devices"] == 1 else f"{row['strategy']}, {row['devices']}"


def _sum(split: dict[str, int]) -> int:
    return sum(split.values())


def _mib(size: int, width: int) -> str:
    return f"{size / 2**20:>{width}.0f}"


def verdict(found: list[dict], sizes: Sequence[int]) -> list[str]:
    """The level to take, why, and what would change it, a line each; for the most devices that were asked about.

    The size of a GPU that it names is the smallest of `sizes`, in GiB, that holds the batch.
    """
    devices = max(row["devices"] for row in found)
    of_devices = {row["strategy"]: row for row in found if row["devices"] == devices}
    alone = next((row for row in found if row["devices"] == 1), None)
    if devices == 1:
        return _verdict_of_one(found[0], sizes)
    if all(of_devices[strategy.name]["cannot"] for strategy in _BY_EFFORT):
        return _verdict_of_none(of_devices, alone, sizes)
    chosen, size = _plainest_that_holds(of_devices, sizes)
    if size is None:
        take = (
            f"No {devices} GPUs of up to {sizes[-1]} GiB hold batch {chosen['batch']}: even {_needs(chosen)} on each."
        )
    else:
        level = "level 02, 03 or 04" if chosen["strategy"] == strategies.DDP.name else "02_ddp_raw/MEMORY_AND_ZERO.md"
        holds = f"{devices} GPUs of {size} GiB hold {_most(chosen, size)}."
        strategy = f"{chosen['strategy']} ({level}): {holds}"
        take = f"Take {strategy}"
        if alone:
            take = f"{_of_one_gpu(alone, sizes)}; from two GPUs on, for speed, take {strategy}"
    return [
        take,
        f"Why: for batch {chosen['batch']} {_why(of_devices, chosen)}",
        f"What would change it: {_change(of_devices, chosen, size, sizes)}",
    ]


def _why(of_devices: dict[str, dict], chosen: dict) -> str:
    ddp = of_devices[strategies.DDP.name]
    data_parallel = of_devices[strategies.DATA_PARALLEL.name]
    if ddp["cannot"]:
        line = f"{_needs(chosen)} on each of {chosen['devices']} GPUs. {_needs(ddp)}."
    else:
        buckets = max(ddp["peaks"], key=_sum)["communication"] / 2**20
        saved = (_peak(ddp) - _peak(of_devices[strategies.BUCKET_VIEWS.name])) / 2**20
        line = (
            f"{_needs(ddp)} on each of {ddp['devices']} GPUs; its buckets cost {buckets:.0f} MiB, "
            f"and gradient_as_bucket_view=True lowers the peak by {saved:.0f} MiB."
        )
    if data_parallel["cannot"]:
        return f"{line} {_needs(data_parallel)}."
    return f"{line} {_needs(data_parallel)} on the first."


def _verdict_of_none(of_devices: dict[str, dict], alone: dict | None, sizes: Sequence[int]) -> list[str]:
    take = "Neither DDP nor ZeRO can train this network as it is."
    if alone:
        take = f"{_of_one_gpu(alone, sizes)}. {take}"
    return [
        take,
        f"Why: {_needs(of_devices[strategies.DDP.name])}.",
        "What would change it: a network, or a loss, without what the reasons name.",
    ]


def _verdict_of_one(alone: dict, sizes: Sequence[int]) -> list[str]:
    size = _smallest(alone, sizes)
    split = alone["peaks"][0]
    largest = max(split, key=lambda category: split[category])
    share = f"{split[largest] / GIB:.2f} GiB are {largest}"
    change = "a batch that does not fit, or a run that takes too long: ask with --devices 2."
    if size is None:
        change = "--precision bf16, --checkpointing or several GPUs: ask with --devices 2 4 8."
    elif _largest(alone, sizes[-1]) is not None and size != sizes[-1]:
        larger = [f"{_most(alone, other)} on {other} GiB" for other in sizes if other > size]
        change = f"a larger GPU holds {', '.join(larger)}; for several GPUs ask with --devices 2."
    return [
        f"{_of_one_gpu(alone, sizes)}.",
        f"Why: for batch {alone['batch']} it needs {_gib(alone)}, of which {share}.",
        f"What would change it: {change}",
    ]


_BY_EFFORT = (strategies.DDP, strategies.ZERO_1, strategies.ZERO_2, strategies.ZERO_3)


def _that_can(of_devices: dict[str, dict], among: Sequence[Strategy]) -> list[dict]:
    return [of_devices[strategy.name] for strategy in among if not of_devices[strategy.name]["cannot"]]


def _plainest_that_holds(of_devices: dict[str, dict], sizes: Sequence[int]) -> tuple[dict, int | None]:
    """The row of DDP, or of the first stage of ZeRO that holds the batch where DDP does not, and the size of a GPU.

    Where nothing holds it, the row that needs least, and None.
    """
    rows_by_effort = _that_can(of_devices, _BY_EFFORT)
    for row in rows_by_effort:
        size = _smallest(row, sizes)
        if size is not None:
            return row, size
    return min(rows_by_effort, key=_peak), None


def _change(of_devices: dict[str, dict], chosen: dict, size: int | None, sizes: Sequence[int]) -> str:
    sharded = _that_can(of_devices, _BY_EFFORT[1:])
    if size is None:
        return "more GPUs, --precision bf16 or --checkpointing."
    fits = _largest(chosen, size)
    if fits is None:
        return "a model that does not fit. " + ", ".join(map(_needs, sharded)) + "."
    holders = []
    for row in sharded:
        largest = _largest(row, size)
        if row is not chosen and largest is not None and largest > CLOSE * fits:
            holders.append(f"{row['strategy']} up to {largest}")
    larger = next((other for other in sizes if other > size), None)
    if larger and _largest(chosen, larger) is not None:
        holders.append(f"{chosen['strategy']} on GPUs of {larger} GiB up to {_largest(chosen, larger)}")
    ask = "ask with --checkpointing or --precision bf16"
    if not holders:
        return f"a batch of more than {fits} samples: {ask}."
    return f"a batch of more than {fits} samples. There {', '.join(holders)}, or {ask}."


def _of_one_gpu(alone: dict, sizes: Sequence[int]) -> str:
    size = _smallest(alone, sizes)
    if size is None:
        return f"No GPU of up to {sizes[-1]} GiB holds batch {alone['batch']} alone, which needs {_gib(alone)}"
    return f"One GPU of {size} GiB holds {_most(alone, size)} (level 00)"


def _smallest(row: dict, sizes: Sequence[int]) -> int | None:
    """The first of the `sizes` whose devices hold the row's batch, in GiB."""
    return next((size for size in sizes if _peak(row) <= size * GIB), None)


def _largest(row: dict, size: int) -> int | None:
    """The largest batch on devices of `size` GiB, if it could be found."""
    batch = row["largest_batch"] and row["largest_batch"][size]
    return batch if isinstance(batch, int) else None


def _most(row: dict, size: int) -> str:
    """The batch that devices of `size` GiB hold, for a sentence: the largest, or else the one asked for."""
    largest = _largest(row, size)
    return f"batch {row['batch'] if largest is None else largest}"


def _needs(row: dict) -> str:
    if row["cannot"]:
        return f"{row['strategy']} cannot: {row['cannot']['reason'].rstrip('.')}"
    return f"{row['strategy']} needs {_gib(row)}"


def _peak(row: dict) -> int:
    return max(map(_sum, row["peaks"]))


def _gib(row: dict) -> str:
    return f"{_peak(row) / GIB:.2f} GiB"
