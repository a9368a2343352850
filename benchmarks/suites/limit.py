"""A staircase from what level 00 does to what the hardware can do: each stair changes one thing about the step.

It stands beside the ladder, not on it. A level of the ladder shows an idea, and keeps the step plain. Here the idea
stays the same, one process that trains BasicNet, and the step is made faster, one change at a time. Each stair keeps
the changes of those below it.

Each stair is checked to be the same training as the first one. In float64, with bf16 switched off, CHECKED_STEPS steps
without dropout must end with the same weights but for rounding (EXACT). Where a stair computes in bf16, its weights may
drift: their distance from the first stair's, as a share of how far those went, must be below MOST_DRIFT.

On a CPU there are the stairs that mean something there. A stair that a machine cannot climb is named, with the reason.
"""

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import cycle, islice, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader

from benchmarks.harness import records
from benchmarks.harness.groups import Extent, Group, chosen
from benchmarks.harness.paired import Samples, measure
from benchmarks.harness.process_facts import process_facts
from common.allocator import keep_large_blocks, minor_faults
from common.args import parse_args
from common.data import load_data
from common.data.digits import MEAN, STD, DigitImages, collate
from common.ladder import script
from common.model import BasicNet

BATCH_SIZE = 64
CHECKED_STEPS = 10
PROFILED_STEPS = 5
WARM_UP_STEPS = 5
# A GPU needs longer until its clocks have settled.
WARM_UP_SECONDS = 0.5
OLDEST_FOR_TRITON = (7, 0)  # the compute capability of a V100
SEED = 42
LEARNING_RATE = 1e-3
# Rounding alone, in float64.
EXACT = 1e-9
# Ten steps in bf16 drift by 0.12 on the synthetic digits and by 0.14 on MNIST. If one of a batch's 64 samples is
# another one, a training in float32 drifts by 0.25 and 0.33; with other batches, by more than 1.
MOST_DRIFT = 0.2
# As Linux names them: of x86 processors, and of ARM's.
BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")
# What a CUDA program calls to wait for the GPU.
WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
# The name in a profile of the time in which Python makes the steps.
MAKING_STEPS = "making steps"


@dataclass(frozen=True)
class Step:
    """The choices by which one optimizer step is made.

    Attributes:
        resident: the images lie on the GPU as bytes; a batch is chosen there.
        fused: AdamW updates all parameters in one kernel.
        channels_last: images and filters lie in memory pixel by pixel, not colour by colour.
        bf16: the forward computes in bfloat16; the weights stay float32.
        compiled: torch.compile fuses what forward and backward compute.
        graphed: the GPU replays a recorded step; Python no longer launches its kernels.
    """

    resident: bool = False
    fused: bool = False
    channels_last: bool = False
    bf16: bool = False
    compiled: bool = False
    graphed: bool = False


@dataclass(frozen=True)
class Stair:
    """A way to make the step, and why this machine cannot (`obstacle`), if it cannot."""

    name: str
    step: Step
    obstacle: str | None = None


def stairs(device: torch.device) -> list[Stair]:
    """The staircase for `device`, from the bottom up."""
    step = Step()
    found = [Stair("as level 00", step)]

    def add(name: str, change: str, obstacle: str | None = None) -> None:
        nonlocal step
        higher = replace(step, **{change: True})
        found.append(Stair(name, higher, obstacle))
        if obstacle is None:
            step = higher

    if device.type == "cuda":
        add("+ data on the GPU", "resident")
    add("+ fused AdamW", "fused")
    add("+ channels_last", "channels_last")
    add("+ bf16", "bf16", why_no_bf16(device))
    add("+ torch.compile", "compiled", why_no_compiler(device))
    if device.type == "cuda":
        add("+ one CUDA graph for a step", "graphed")
    return found


def why_no_bf16(device: torch.device) -> str | None:
    """The reason why bfloat16 would be slow on `device`, or None."""
    if device.type == "cuda":
        return None if torch.cuda.is_bf16_supported(including_emulation=False) else "the GPU has no bf16 instructions"
    has_instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if torch.backends.mkldnn.is_available() and has_instructions:
        return None
    return "the CPU has no bf16 instructions"


def why_no_compiler(device: torch.device) -> str | None:
    """The reason why torch.compile cannot run on `device`, or None."""
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) < OLDEST_FOR_TRITON:
            return "the GPU is older than those that Triton compiles for"
        if find_spec("triton") is None:
            return "torch.compile needs Triton"
        if not any(map(shutil.which, [os.environ.get("CC", "gcc"), "gcc", "clang"])):
            return "Triton needs a C compiler"
        return None
    return None if shutil.which("c++") or shutil.which("g++") else "torch.compile needs a C++ compiler"


class Training:
    """BasicNet in training on a set of digits, the step made as `step` says.

    Batches that are not resident are loaded as level 00 loads them: for a GPU into pinned memory, from which they are
    copied without waiting.

    Args:
        dataset: the images and labels, on the CPU.
        dtype: of the weights and images; float64 to compare stairs.
        dropout: off to compare stairs.
    """

    def __init__(
        self,
        step: Step,
        dataset: DigitImages,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        dropout: bool = True,
    ) -> None:
        self.how = step
        self.device = device
        self.dtype = dtype
        # The images are normalised in `dtype` too: in float32 a GPU rounds them otherwise than a CPU does.
        self.dataset = copy(dataset)
        self.dataset.dtype = dtype
        torch.manual_seed(SEED)
        self.model = BasicNet(dropout).to(device=device, dtype=dtype)
        if step.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=LEARNING_RATE,
            fused=step.fused or None,  # False would switch off foreach too, which level 00 has on a GPU
            capturable=step.graphed,
        )
        self.forward = torch.compile(self.model) if step.compiled else self.model
        drawn = self._drawn()
        if step.resident:
            self.images = dataset.images.to(device)
            self.labels = dataset.labels.to(device)
            self._indices = [indices.pin_memory() for indices in drawn]
        else:
            self._loader = DataLoader(
                self.dataset,
                batch_sampler=[indices.tolist() for indices in drawn],
                collate_fn=collate,
                pin_memory=device.type == "cuda",
            )
        self._graph: torch.cuda.CUDAGraph | None = None
        self._next_indices: Tensor | None = None

    def _drawn(self) -> list[Tensor]:
        """The samples of each batch of an epoch: int64, (BATCH_SIZE,)."""
        order = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(SEED))
        return list(order[: len(order) // BATCH_SIZE * BATCH_SIZE].split(BATCH_SIZE))

    def train(self, steps: int) -> None:
        """Take `steps` optimizer steps, over the same batches for every stair, and wait until the last is done."""
        self.make_steps(steps)
        self.wait()

    def make_steps(self, steps: int) -> None:
        """Take `steps` optimizer steps from the epoch's first batch on. A GPU may still compute when this returns."""
        if self.how.graphed:
            for indices in islice(cycle(self._indices), steps):
                self._replay(indices)
        else:
            for images, labels in islice(self._batches(), steps):
                self._step(images, labels)

    def wait(self) -> None:
        """Wait until the GPU, if there is one, has done all steps."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _step(self, images: Tensor, labels: Tensor) -> None:
        if self.how.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        # A recorded step must cast the weights each time, not take over what an earlier step has cast.
        cache = not self.how.graphed
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.how.bf16, cache_enabled=cache):
            log_probs = self.forward(images)
        loss = F.nll_loss(log_probs.to(self.dtype), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of one epoch after another, all in the same order."""
        while True:
            if self.how.resident:
                for indices in self._indices:
                    yield self._chosen(indices.to(self.device, non_blocking=True))
            else:
                for images, labels in self._loader:
                    yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)

    def _chosen(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        images = self.images[indices].to(self.dtype).div_(255).sub_(MEAN).div_(STD)
        return images, self.labels[indices]

    def _replay(self, indices: Tensor) -> None:
        if self._graph is None:
            self._record(indices)
        self._next_indices.copy_(indices, non_blocking=True)
        self._graph.replay()

    def _record(self, indices: Tensor) -> None:
        """Record one step as a CUDA graph, which trains on the samples that `_next_indices` then holds.

        A step must have run before it is recorded, on a stream of its own, because the first one allocates the
        optimizer's state. The training that this needs is undone. Source: torch's notes on CUDA graphs.
        """
        self._next_indices = indices.to(self.device)
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self._step(*self._chosen(self._next_indices))
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step(*self._chosen(self._next_indices))
        self.model.load_state_dict(weights)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()

    def weights(self) -> Tensor:
        """All parameters as one vector, float64, on the CPU."""
        flat = [parameter.detach().flatten() for parameter in self.model.parameters()]
        return torch.cat(flat).double().cpu()


class Ends(NamedTuple):
    """The weights that a training began and ended with: all parameters as one vector each."""

    start: Tensor
    end: Tensor


def trained(step: Step, dataset: DigitImages, device: torch.device, dtype: torch.dtype) -> Ends:
    """The weights before and after CHECKED_STEPS steps without dropout."""
    training = Training(step, dataset, device, dtype, dropout=False)
    start = training.weights()
    training.train(CHECKED_STEPS)
    return Ends(start, training.weights())


def distance(stair: Stair, dataset: DigitImages, device: torch.device) -> float:
    """The largest difference between the weights of `stair` and of the first one, in float64, without bf16."""
    ours = trained(replace(stair.step, bf16=False), dataset, device, torch.float64)
    first = trained(Step(), dataset, device, torch.float64)
    return (ours.end - first.end).abs().max().item()


def drift(stair: Stair, dataset: DigitImages, device: torch.device) -> float:
    """The distance of `stair`'s last weights from the first stair's, as a share of how far those went, in float32."""
    ours = trained(stair.step, dataset, device, torch.float32)
    first = trained(Step(), dataset, device, torch.float32)
    return ((ours.end - first.end).norm() / (first.end - first.start).norm()).item()


def checked(stair: Stair, dataset: DigitImages, device: torch.device) -> dict[str, float]:
    """Evidence that `stair` is the same training as the first one, as facts of its row.

    Raises:
        ValueError: naming the stair, if it is another training.
    """
    far = distance(stair, dataset, device)
    if not far <= EXACT:
        raise ValueError(f"{stair.name} is another training: |Δw| is {far:.1e} in float64, not below {EXACT:.0e}")
    found = {"max_weight_difference": far, "tolerance": EXACT}
    if stair.step.bf16:
        drifted = drift(stair, dataset, device)
        if not drifted <= MOST_DRIFT:
            raise ValueError(f"{stair.name} is another training: it drifts by {drifted:.2f}, not below {MOST_DRIFT}")
        found |= {"drift": records.rounded(drifted), "most_drift": MOST_DRIFT}
    return found


@dataclass(frozen=True)
class Profile:
    """The demands of one step on the device.

    Attributes:
        launches: kernels and copies on a GPU, those that a graph replays among them; operations of torch on a CPU,
            without those that another one calls or that torch.compile has generated.
        waiting: milliseconds in which Python waits for the GPU while it makes the steps; None on a CPU.
    """

    launches: float
    waiting: float | None


def profiled(training: Training) -> Profile:
    """A step's profile: the mean over PROFILED_STEPS steps. Warm `training` up first."""
    on_gpu = training.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as recorded:
        with record_function(MAKING_STEPS):
            training.make_steps(PROFILED_STEPS)
        training.wait()
    events = recorded.events()
    if on_gpu:
        return Profile(kernels(events) / PROFILED_STEPS, waiting_ms(events) / PROFILED_STEPS)
    return Profile(operations(events) / PROFILED_STEPS, None)


def operations(events: Sequence[Any]) -> int:
    """The number of a profile's events that are operations of torch and that no other operation has called.

    A backward's and an optimizer's are called by events that are not operations, such as "Optimizer.step#AdamW.step".
    """
    return sum(_is_operation(event) and not _called_by_operation(event) for event in events)


def _is_operation(event: Any) -> bool:
    return event.name.startswith("aten::")


def _called_by_operation(event: Any) -> bool:
    caller = event.cpu_parent
    while caller is not None:
        if _is_operation(caller):
            return True
        caller = caller.cpu_parent
    return False


def kernels(events: Sequence[Any]) -> int:
    """The number of a profile's events that ran on the GPU. A `record_function` is shown there too, but not counted."""
    on_gpu = [event for event in events if event.device_type == DeviceType.CUDA]
    return sum(not event.is_user_annotation for event in on_gpu)


def waiting_ms(events: Sequence[Any]) -> float:
    """Milliseconds of a profile in which Python waited for the GPU while it made the steps.

    The last wait, for all steps to be done, comes after them and is not counted.
    """
    (made,) = [event for event in events if event.name == MAKING_STEPS and event.device_type == DeviceType.CPU]
    waits = [event for event in events if event.name in WAITING and event.time_range.start < made.time_range.end]
    return sum(event.cpu_time_total for event in waits) / 1000


class Staircase:
    """The stairs that this machine can climb, to be measured in turns, and what is known of each.

    Making one builds and warms up every stair, or those with these `names`, and checks that each is the same training.
    A sample of a stair is as many steps as take it about `seconds`.

    Raises:
        ValueError: naming a stair that is another training.
    """

    def __init__(
        self, dataset: DigitImages, device: torch.device, seconds: float, names: Sequence[str] | None = None
    ) -> None:
        self.seconds = seconds
        self.device = device
        self.facts: dict[str, dict] = {}
        self.contestants: dict[str, Callable[[], float]] = {}
        self.skipped: list[str] = []
        for stair in stairs(device):
            if names is not None and stair.name not in names:
                continue
            if stair.obstacle is None:
                self._add(stair, dataset, device)
            else:
                self.skipped.append(f"{stair.name}: {stair.obstacle}")

    def _add(self, stair: Stair, dataset: DigitImages, device: torch.device) -> None:
        evidence = checked(stair, dataset, device)
        training = Training(stair.step, dataset, device)
        warm_up(training)
        seen = profiled(training)
        steps = steps_for(self.seconds, training)
        self.facts[stair.name] = {
            "device": device.type,
            "global_batch_size": BATCH_SIZE,
            "steps": steps,
            "launches_per_step": seen.launches,
            "waiting_ms_per_step": seen.waiting,
            **evidence,
            **process_facts(),
        }
        self.contestants[stair.name] = partial(self._sample, stair.name, training, steps)

    def _sample(self, name: str, training: Training, steps: int) -> float:
        before = minor_faults()
        rate = images_per_sec(training, steps)
        if before is not None:
            self.facts[name]["minor_faults_per_step"] = (minor_faults() - before) / steps
        return rate


TITLE = f"from level 00's step to the hardware's limit: batch {BATCH_SIZE}"


def groups() -> list[Group]:
    """The stairs that this machine can climb."""
    possible = [stair.name for stair in stairs(_device()) if stair.obstacle is None]
    return [Group("limit", TITLE, tuple(possible), measured)]


def measured(rows: tuple[str, ...], extent: Extent) -> dict:
    keep_large_blocks()  # as the levels do
    args = parse_args(str(script("00_single_gpu")), [*extent.data_flags, "--train-samples", "6400"])
    train_set, _ = load_data(args)
    staircase = Staircase(train_set, _device(), extent.seconds, names=rows)
    samples = measure(chosen(staircase.contestants, rows), extent.rounds)
    found = record(samples, staircase)
    obstacles = [f"{stair.name}: {stair.obstacle}" for stair in stairs(_device()) if stair.obstacle]
    return found | {"skipped": obstacles}


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def images_per_sec(training: Training, steps: int) -> float:
    """The rate of `steps` steps of a training that is warm."""
    began = time.perf_counter()
    training.train(steps)
    return steps * BATCH_SIZE / (time.perf_counter() - began)


def record(samples: Samples, staircase: Staircase) -> dict:
    """With the ratio of each stair to the one below, and of the fastest to the first."""
    names = list(samples)
    ratios = [(above, below) for below, above in pairwise(names)]
    fastest = max(names, key=lambda name: statistics.median(samples[name]))
    whole = (fastest, names[0])
    if fastest != names[0] and whole not in ratios:
        ratios.append(whole)
    found = records.group(TITLE, "images/s", samples, staircase.facts, ratios)
    found["bf16"] = bf16_instructions(staircase.device)
    found["notes"] = [_launches(staircase), *_waits(staircase), found["bf16"]]
    found["skipped"] = staircase.skipped
    return found


def bf16_instructions(device: torch.device) -> str:
    """A sentence on whether `device` computes in bf16 by itself, and by which of a CPU's instruction sets.

    Nothing else decides as much whether bf16 pays: without such instructions torch converts each number to float32.
    """
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}: {why_no_bf16(device) or 'the GPU has bf16 instructions'}."
    return cpu_bf16_instructions(records.machine()["cpu_flags"])


def cpu_bf16_instructions(flags: Sequence[str]) -> str:
    """The same for a CPU with these instruction sets, as a record names them with its machine."""
    known = [flag for flag in flags if flag in BF16_FLAGS]
    if known:
        return f"This CPU has instructions for bf16: {', '.join(known)}."
    return f"This CPU has none of the instructions for bf16 that torch uses: {', '.join(BF16_FLAGS)}."


def _launches(staircase: Staircase) -> str:
    counts = [f"{name} {facts['launches_per_step']:.0f}" for name, facts in staircase.facts.items()]
    first, *_ = staircase.facts.values()
    what = "Kernels and copies" if first["device"] == "cuda" else "Operations"
    return f"{what} per step: {', '.join(counts)}."


def _waits(staircase: Staircase) -> list[str]:
    waits = {name: facts["waiting_ms_per_step"] for name, facts in staircase.facts.items()}
    if None in waits.values():
        return []
    rows = [f"{name} {wait:.2f}" for name, wait in waits.items()]
    return [f"Milliseconds of waiting for the GPU per step: {', '.join(rows)}."]


def warm_up(training: Training) -> None:
    """Train until a sample would show how fast the device is: on a GPU for WARM_UP_SECONDS."""
    least = WARM_UP_SECONDS if training.device.type == "cuda" else 0
    began = time.perf_counter()
    training.train(WARM_UP_STEPS)
    while time.perf_counter() - began < least:
        training.train(WARM_UP_STEPS)


def steps_for(seconds: float, training: Training) -> int:
    """The number of steps of a warm training that take about `seconds`, by the median of three tries."""
    rates = [images_per_sec(training, WARM_UP_STEPS) for _ in range(3)]
    return max(1, round(seconds * statistics.median(rates) / BATCH_SIZE))


if __name__ == "__main__":
    raise SystemExit("error: a suite is run by: pytest benchmarks -k test_limit")
