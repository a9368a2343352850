"""Random small trainings on the core and on Accelerate itself end with the same bits.

A seed draws the script: accumulation, schedulers, clipping, dropout, skipped batches, several models. Both
libraries run it in this process, or on two ranks over gloo. Weights, learning rates, sync flags, losses and norms are
compared bit for bit. A script that touches a row of DIFFERENCES.md is counted by that row and not compared; at most
a quarter may touch one.
"""

import collections
import contextlib
import copy
import importlib
import random
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from common.process_group import keep_process_group
from common.processes import ranks
from tests.states import OURS, THEIRS, forget_states

pytest.importorskip("accelerate")
WIDTH = 4


@dataclass(frozen=True)
class Script:
    """What a training script asks for. `batch_size` is that of one process."""

    samples: int = 13
    batch_size: int = 2
    epochs: int = 2
    order: str = "sequential"
    drop_last: bool = False
    split_batches: bool = False
    accumulation: int = 1
    window: str = "accumulate"
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    adjust_scheduler: bool = True
    models: int = 1
    optimizer: str = "sgd"
    schedule: str = "none"
    step_scheduler_with_optimizer: bool = True
    clip: str = "none"
    dropout: float = 0.0
    precision: str = "no"
    skipped: int = 0
    evaluation: str = "none"

    def row(self) -> str | None:
        """The deliberate difference that it touches."""
        if self.precision == "fp16":
            return "fp16 on CPU"
        if self.evaluation == "broken off":
            return "`break`, exceptions, nested loaders"
        return None


# What `drawn` chooses from. A value stands as often as its weight.
CHOICES = {
    "samples": range(2, 26),
    "batch_size": [2, 4],
    "epochs": [1, 2, 3],
    "order": ["sequential", "seedable", "shuffled", "shuffled"],
    "drop_last": [False, True],
    "split_batches": [False, True],
    "accumulation": [1, 2, 3, 4],
    "window": ["accumulate"] * 4 + ["no_sync"],
    "sync_with_dataloader": [True, True, False],
    "sync_each_batch": [False, True],
    "adjust_scheduler": [True, False],
    "models": [1, 1, 2],
    "optimizer": ["sgd", "adamw", "fused"],
    "schedule": ["none", "step", "lambda", "one cycle", "cosine", "sequential", "chained", "plateau", "cyclic"],
    "step_scheduler_with_optimizer": [True, True, False],
    "clip": ["none", "norm where it syncs", "norm", "value"],
    "dropout": [0.0, 0.5],
    "precision": ["no"] * 12 + ["bf16"] * 6 + ["fp16"],
    "skipped": [0, 0, 1, 2],
    "evaluation": ["none"] * 9 + ["nested"] * 9 + ["broken off"],
}


def drawn(seed):
    """The random script number `seed`."""
    generator = random.Random(seed)
    return Script(**{name: generator.choice(values) for name, values in CHOICES.items()})


def new_model(script):
    layers = [torch.nn.Linear(WIDTH, 6), torch.nn.Tanh(), torch.nn.Dropout(script.dropout), torch.nn.Linear(6, 1)]
    return torch.nn.Sequential(*layers)


def new_optimizer(script, model):
    if script.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=script.optimizer == "fused")


def new_scheduler(script, optimizer):
    schedulers = torch.optim.lr_scheduler
    steps = max(2, script.epochs * script.samples // (script.batch_size * script.accumulation))
    if script.schedule == "step":
        return schedulers.StepLR(optimizer, 2, gamma=0.5)
    if script.schedule == "lambda":
        return schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if script.schedule == "one cycle":
        return schedulers.OneCycleLR(optimizer, 0.1, total_steps=steps)
    if script.schedule == "cosine":
        return schedulers.CosineAnnealingLR(optimizer, steps)
    if script.schedule == "sequential":
        warmup = schedulers.LinearLR(optimizer, 0.1, 1.0, total_iters=2)
        decay = schedulers.ExponentialLR(optimizer, 0.9)
        return schedulers.SequentialLR(optimizer, [warmup, decay], milestones=[2])
    if script.schedule == "chained":
        constant = schedulers.ConstantLR(optimizer, 0.5, 3)
        decay = schedulers.ExponentialLR(optimizer, 0.9)
        return schedulers.ChainedScheduler([constant, decay])
    if script.schedule == "plateau":
        return schedulers.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
    if script.schedule == "cyclic":
        return schedulers.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2, cycle_momentum=False)
    return None


def clip(script, accelerator, models):
    """Clip as the script does, and return the norms."""
    parameters = [parameter for model in models for parameter in model.parameters()]
    if script.clip == "value":
        accelerator.clip_grad_value_(parameters, 0.05)
    elif script.clip == "norm" or (script.clip == "norm where it syncs" and accelerator.sync_gradients):
        return [accelerator.clip_grad_norm_(parameters, 0.1).clone()]
    return []


def new_accelerator(library, script, **settings):
    root = importlib.import_module(library)
    utils = importlib.import_module(f"{library}.utils")
    loading = utils.DataLoaderConfiguration(
        split_batches=script.split_batches, use_seedable_sampler=script.order == "seedable", data_seed=5
    )
    plugin = utils.GradientAccumulationPlugin(
        num_steps=script.accumulation,
        adjust_scheduler=script.adjust_scheduler,
        sync_with_dataloader=script.sync_with_dataloader,
        sync_each_batch=script.sync_each_batch,
    )
    accelerator = root.Accelerator(
        mixed_precision=script.precision,
        gradient_accumulation_plugin=plugin,
        dataloader_config=loading,
        step_scheduler_with_optimizer=script.step_scheduler_with_optimizer,
        cpu=True,
        **settings,
    )
    torch.set_num_threads(1)
    return accelerator


class Training:
    """One run of a script, and what it saw."""

    def __init__(self, accelerator, script):
        self.accelerator = accelerator
        self.script = script
        self.seen = collections.defaultdict(list)
        torch.manual_seed(3)
        rows = torch.randn(script.samples, WIDTH), torch.randn(script.samples, 1)
        data = TensorDataset(*rows)
        models = [new_model(script) for _ in range(script.models)]
        optimizers = [new_optimizer(script, model) for model in models]
        schedulers = [new_scheduler(script, optimizer) for optimizer in optimizers]
        parts = accelerator.num_processes if script.split_batches else 1  # of a batch
        loader = DataLoader(
            data,
            batch_size=script.batch_size * parts,
            shuffle=script.order != "sequential",
            drop_last=script.drop_last,
        )
        evaluation = DataLoader(data, batch_size=2 * parts)
        count = script.models
        prepared = accelerator.prepare(*schedulers, loader, *models, evaluation, *optimizers)
        self.schedulers = prepared[:count]
        self.loader = prepared[count]
        self.models = prepared[count + 1 : 2 * count + 1]
        self.evaluation = prepared[2 * count + 1]
        self.optimizers = prepared[2 * count + 2 :]

    def run(self):
        for epoch in range(self.script.epochs):
            self.loader.set_epoch(epoch)
            loader = self.loader
            if epoch == 0 and self.script.skipped:
                loader = self.accelerator.skip_first_batches(loader, self.script.skipped)
            for number, (x, y) in enumerate(loader):
                with self.window(number):
                    self.micro_batch(x, y, number)
                self.evaluate()

    def window(self, number):
        if self.script.window == "accumulate":
            return self.accelerator.accumulate(*self.models)
        unsynced = contextlib.ExitStack()
        if not self.ends_window(number):
            for model in self.models:
                unsynced.enter_context(self.accelerator.no_sync(model))
        return unsynced

    def ends_window(self, number):
        return self.script.window == "accumulate" or (number + 1) % self.script.accumulation == 0

    def micro_batch(self, x, y, number):
        prediction = sum(model(x) for model in self.models)
        loss = torch.nn.functional.mse_loss(prediction, y)
        self.accelerator.backward(loss)
        self.seen["loss"].append(loss.detach())
        if self.ends_window(number):
            self.seen["norm"] += clip(self.script, self.accelerator, self.models)
            for optimizer in self.optimizers:
                optimizer.step()
            for scheduler in self.schedulers:
                if scheduler is not None:
                    metric = [loss.detach()] if self.script.schedule == "plateau" else []
                    scheduler.step(*metric)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        self.seen["sync"].append(self.accelerator.sync_gradients)
        self.seen["skipped"].append(self.accelerator.optimizer_step_was_skipped)
        self.seen["rate"].append([optimizer.param_groups[0]["lr"] for optimizer in self.optimizers])

    def evaluate(self):
        if self.script.evaluation != "none":
            with torch.no_grad():
                for x, _ in self.evaluation:
                    self.seen["evaluated"].append(self.models[0](x).sum())
                    if self.script.evaluation == "broken off":
                        break


def end(library, accelerator):
    """End the training, so that the next one in this process can be one of the other library."""
    keep_process_group()
    accelerator.end_training()
    forget_states(library)


def outcome(library, script, **settings):
    """What a training on `library` sees, its weights, and the type of an error that ended it."""
    threads = torch.get_num_threads()
    accelerator = new_accelerator(library, script, **settings)
    try:
        training = Training(accelerator, script)
        error = None
        try:
            training.run()
        except Exception as failure:
            error = type(failure).__name__, str(failure)
        weights = [accelerator.unwrap_model(model).state_dict() for model in training.models]
        states = [optimizer.state_dict()["state"] for optimizer in training.optimizers]
        return copy.deepcopy({"seen": dict(training.seen), "weights": weights, "states": states, "error": error})
    finally:
        end(library, accelerator)
        torch.set_num_threads(threads)


def assert_same_bits(ours, theirs, where="outcome"):
    assert type(ours) is type(theirs), where
    if isinstance(ours, dict):
        assert list(ours) == list(theirs), where
        for key in ours:
            assert_same_bits(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), where
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same_bits(one, other, f"{where}[{index}]")
    elif isinstance(ours, torch.Tensor):
        same = torch.equal(ours, theirs) or (ours.isnan().all() and theirs.isnan().all())
        assert same, f"{where}: {ours} and {theirs}"
    else:
        assert ours == theirs or (ours != ours and theirs != theirs), f"{where}: {ours} and {theirs}"


def compare(script, processes):
    if processes == 1:
        ours = outcome(OURS, script)
        theirs = outcome(THEIRS, script)
    else:
        ours = ranks(processes).run(outcome, OURS, script)
        theirs = ranks(processes).run(outcome, THEIRS, script)
    assert_same_bits(ours, theirs)


def compare_random_scripts(seeds, processes):
    """Compare the scripts of `seeds`; those that touch a row of the table are only counted.

    Returns how many are equal (None) or touch a row, by row.
    """
    counts = collections.Counter()
    for seed in seeds:
        script = drawn(seed)
        row = script.row()
        counts[row] += 1
        if row is not None:
            continue
        try:
            compare(script, processes)
        except AssertionError as error:
            raise AssertionError(f"script {seed} on {processes} processes, {script}: {error}") from error
    print(f"{processes} processes, {len(seeds)} scripts: {dict(counts)}")
    assert counts[None] >= 0.75 * len(seeds), counts
    return counts


def test_random_scripts_end_with_the_bits_of_accelerate_in_one_process():
    compare_random_scripts(range(30), 1)


def test_random_scripts_end_with_the_bits_of_accelerate_on_two_processes():
    compare_random_scripts(range(8), 2)


@pytest.mark.long
@pytest.mark.parametrize(("number", "processes"), [(300, 1), (150, 2), (60, 3)])
def test_many_random_scripts_end_with_the_bits_of_accelerate(number, processes):
    compare_random_scripts(range(number), processes)


# Features with a collective of their own


def hooked(library, hook, wrapper, option):
    """A training whose gradients are compressed while they travel."""
    utils = importlib.import_module(f"{library}.utils")
    kinds = utils.DDPCommunicationHookType
    handler = utils.DistributedDataParallelKwargs(
        comm_hook=kinds(hook), comm_wrapper=kinds(wrapper), comm_state_option=option
    )
    script = Script(samples=24, order="sequential", dropout=0.5, schedule="one cycle")
    return outcome(library, script, kwargs_handlers=[handler])


@pytest.mark.parametrize(
    ("hook", "wrapper", "option"),
    [
        ("no", "no", {}),
        ("fp16", "no", {}),
        ("bf16", "no", {}),
        ("power_sgd", "fp16", {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2}),
    ],
)
def test_communication_hooks_give_the_weights_that_they_give_on_accelerate(hook, wrapper, option):
    ours = ranks(2).run(hooked, OURS, hook, wrapper, option)
    assert_same_bits(ours, ranks(2).run(hooked, THEIRS, hook, wrapper, option))
    assert ours[0]["error"] is None
    assert_same_bits(ours[0]["weights"], ours[1]["weights"])
    if hook != "no":  # a hook that does nothing would pass too
        plain = ranks(2).run(hooked, OURS, "no", "no", {})
        assert not torch.equal(ours[0]["weights"][0]["0.weight"], plain[0]["weights"][0]["0.weight"])


def local(library, local_sgd_steps, enabled):
    """A training whose processes average their weights every few steps, and what each had before."""
    root = importlib.import_module(library)
    local_sgd_module = importlib.import_module(f"{library}.local_sgd")
    accelerator = root.Accelerator(cpu=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.randn(28, WIDTH), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    averaging = local_sgd_module.LocalSGD(
        accelerator=accelerator, model=model, local_sgd_steps=local_sgd_steps, enabled=enabled
    )
    with averaging as local_sgd:
        for batch in loader:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            seen.append(accelerator.unwrap_model(model).weight.detach().clone())
            local_sgd.step()
    weights = accelerator.unwrap_model(model).weight.detach().clone()
    end(library, accelerator)
    return seen, weights


@pytest.mark.parametrize("enabled", [True, False])
def test_local_sgd_gives_the_weights_that_it_gives_on_accelerate(enabled):
    ours = ranks(2).run(local, OURS, 3, enabled)
    assert_same_bits(ours, ranks(2).run(local, THEIRS, 3, enabled))
    (one_seen, one), (other_seen, other) = ours
    # Local steps differ between the processes, and the last average makes them agree.
    assert torch.equal(one_seen[-1], other_seen[-1]) is not enabled
    assert torch.equal(one, other)


def test_local_sgd_does_nothing_in_one_process():
    assert_same_bits(local(OURS, 3, True), local(THEIRS, 3, True))


def profiled(library, folder):
    root = importlib.import_module(library)
    utils = importlib.import_module(f"{library}.utils")
    handler = utils.ProfileKwargs(
        activities=["cpu"],
        record_shapes=True,
        output_trace_dir=str(folder),
        schedule_option={"wait": 1, "warmup": 1, "active": 1},
    )
    accelerator = root.Accelerator(cpu=True, kwargs_handlers=[handler])
    model = accelerator.prepare(torch.nn.Linear(WIDTH, 1))
    with accelerator.profile() as profiler:
        for _ in range(3):
            model(torch.ones(2, WIDTH))
            profiler.step()
    counted = {event.key: event.count for event in profiler.key_averages() if event.key.startswith("aten::")}
    with accelerator.profile(utils.ProfileKwargs()):
        pass
    end(library, accelerator)
    return counted


def test_a_profile_holds_and_writes_what_it_does_on_accelerate(tmp_path):
    ours = profiled(OURS, tmp_path / "ours")
    theirs = profiled(THEIRS, tmp_path / "theirs")
    assert ours == theirs and ours["aten::linear"] == 1
    names = sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "theirs").iterdir()) == ["profile_0.json"]


def test_an_activity_that_cannot_be_profiled_is_named():
    from common.accelerator.utils import ProfileKwargs

    with pytest.raises(ValueError, match="Invalid profiler activity: tpu"):
        ProfileKwargs(activities=["tpu"]).build()


def unwrapping(library):
    """What a compiled model is called, before and after it is unwrapped."""
    root = importlib.import_module(library)
    accelerator = root.Accelerator(dynamo_backend="eager", cpu=True)
    model = accelerator.prepare(torch.nn.Linear(WIDTH, 1))
    found = {"type": type(model).__name__, "forward": model(torch.ones(2, WIDTH)).shape}
    inside = torch.nn.DataParallel(torch.compile(torch.nn.Linear(WIDTH, 1), backend="eager"))
    outside = torch.compile(torch.nn.DataParallel(torch.nn.Linear(WIDTH, 1)), backend="eager")
    for name, wrapped in (("prepared", model), ("inside", inside), ("outside", outside)):
        for keep in (True, False):
            unwrapped = accelerator.unwrap_model(wrapped, keep_torch_compile=keep)
            found[name, keep] = type(unwrapped).__name__, list(unwrapped.state_dict())
        found[name] = list(accelerator.get_state_dict(wrapped)), list(wrapped.state_dict())
    kept = accelerator.unwrap_model(model)
    found["same"] = kept is model
    end(library, accelerator)
    return found


def test_compiled_models_unwrap_as_on_accelerate():
    ours = unwrapping(OURS)
    assert ours == unwrapping(THEIRS)
    assert ours["type"] == "OptimizedModule"
