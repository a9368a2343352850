"""What a training script sees in one process: windows, schedulers, gathering, unwrapping, settings."""

import copy
import itertools
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import common.accelerator
from common.accelerator import Accelerator
from common.accelerator.data_loader import get_sampler
from common.accelerator.state import DistributedType, GradientState, PartialState
from common.accelerator.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProjectConfiguration,
)


def data(n):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 4, generator=generator), torch.randn(n, 1, generator=generator)


class Stream(IterableDataset):
    def __init__(self, n):
        self.pairs = list(zip(*data(n), strict=True))

    def __iter__(self):
        return iter(self.pairs)


def train(accelerator, loader, model, optimizer, clip=None, own_backward=False):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward() if own_backward else accelerator.backward(loss)
            if clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


def parts(seed=0, lr=0.1, dtype=torch.float64):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 1, dtype=dtype)
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def weights_after_an_epoch(n, batch, accumulation, dataset=TensorDataset, clip=None):
    PartialState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(gradient_accumulation_steps=accumulation, cpu=True)
    model, optimizer = parts()
    pairs = [tensor.double() for tensor in data(n)]
    source = TensorDataset(*pairs) if dataset is TensorDataset else Stream(n)
    if dataset is not TensorDataset:
        source.pairs = list(zip(*pairs, strict=True))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(source, batch_size=batch))
    train(accelerator, loader, model, optimizer, clip)
    return model.weight.detach().clone()


# Accumulation


@pytest.mark.parametrize("dataset", [TensorDataset, Stream])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_accumulating_k_micro_batches_equals_a_batch_of_k_times_the_size(dataset, clip):
    for n in (12, 24, 18, 20):  # whole windows; windows cut short by the end, of one and of two micro-batches
        expected = weights_after_an_epoch(n, 6, 1, clip=clip)
        if n % 2 == 0 and n % 6 in (0, 2, 4):
            torch.testing.assert_close(weights_after_an_epoch(n, 2, 3, dataset, clip), expected, rtol=0, atol=1e-12)


def test_the_last_window_is_averaged_over_its_actual_size():
    # https://github.com/huggingface/transformers/issues/38837: the original divides it by the full size.
    full = weights_after_an_epoch(8, 8, 1)
    assert torch.allclose(weights_after_an_epoch(8, 4, 5), full, rtol=0, atol=1e-12)
    theirs = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState as TheirState
    from accelerate.state import GradientState as TheirGradients

    TheirState._reset_state(True)
    TheirGradients._reset_state()
    accelerator = theirs.Accelerator(gradient_accumulation_steps=5, cpu=True)
    model, optimizer = parts()
    pairs = TensorDataset(*[tensor.double() for tensor in data(8)])
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(pairs, batch_size=4))
    train(accelerator, loader, model, optimizer)
    assert not torch.allclose(model.weight, full, rtol=0, atol=1e-3)


def test_a_loss_that_the_script_divides_itself_is_not_scaled_again():
    accelerator = Accelerator(gradient_accumulation_steps=3, cpu=True)
    model, optimizer = parts()
    pairs = TensorDataset(*[tensor.double() for tensor in data(4)])
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(pairs, batch_size=2))
    train(accelerator, loader, model, optimizer, own_backward=True)
    reference, sgd = parts()
    x, y = (tensor.double() for tensor in data(4))
    (2 * torch.nn.functional.mse_loss(reference(x), y)).backward()
    sgd.step()
    assert torch.allclose(model.weight, reference.weight, rtol=0, atol=1e-12)


def test_windows_equal_those_of_accelerate():
    theirs = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState as TheirState
    from accelerate.state import GradientState as TheirGradients
    from accelerate.utils import GradientAccumulationPlugin as TheirPlugin

    for steps, n, with_loader in itertools.product((1, 2, 3), (1, 4, 5), (True, False)):
        TheirState._reset_state(True)
        TheirGradients._reset_state()
        GradientState._reset_state()
        seen = []
        for library, plugin in ((Accelerator, GradientAccumulationPlugin), (theirs.Accelerator, TheirPlugin)):
            accelerator = library(
                gradient_accumulation_plugin=plugin(num_steps=steps, sync_with_dataloader=with_loader), cpu=True
            )
            loader = accelerator.prepare(DataLoader(range(n)))
            flags = []
            for _ in range(2):
                for _ in loader:
                    with accelerator.accumulate():
                        flags.append(accelerator.sync_gradients)
            seen.append(flags)
        assert seen[0] == seen[1]


def test_a_nested_evaluation_does_not_disturb_the_window():
    # https://github.com/huggingface/accelerate/issues/1050
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    train_loader, eval_loader = accelerator.prepare(DataLoader(range(5)), DataLoader(range(3)))
    flags = []
    for _ in train_loader:
        with accelerator.accumulate():
            flags.append(accelerator.sync_gradients)
        for _ in eval_loader:
            break
        for _ in eval_loader:
            pass
    assert flags == [False, True, False, True, True]


def test_clipping_waits_for_the_end_of_the_window():
    # https://github.com/huggingface/accelerate/issues/641
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    loader = DataLoader(TensorDataset(*data(4)), batch_size=2)
    model, _, loader = accelerator.prepare(*parts(dtype=None), loader)
    norms = []
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(1000 * torch.nn.functional.mse_loss(model(x), y))
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0))
            accelerator.clip_grad_value_(model.parameters(), 0.01)
            largest = model.weight.grad.abs().max()
            assert largest <= 0.01 if accelerator.sync_gradients else largest > 1
    assert norms[0] > 1 and norms[1] > 1


# Schedulers


def test_a_metric_driven_scheduler_steps_once():
    # https://github.com/huggingface/accelerate/issues/3797
    accelerator = Accelerator(cpu=True)
    _, optimizer = parts()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    accelerator.state.num_processes = 4
    for expected in (0.1, 0.05, 0.025):
        scheduler.step(1.0)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("split", "with_optimizer", "expected"), [(False, True, 4), (True, True, 1), (False, False, 1)]
)
def test_other_schedulers_step_once_per_process_unless_told_otherwise(split, with_optimizer, expected):
    accelerator = Accelerator(split_batches=split, step_scheduler_with_optimizer=with_optimizer, cpu=True)
    _, optimizer = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    accelerator.state.num_processes = 4
    optimizer.step()
    scheduler.step()
    assert scheduler.last_epoch == expected


@pytest.mark.parametrize("adjust", [None, False, True])
def test_the_scheduler_follows_the_optimizer_or_if_adjusted_the_micro_batches(adjust):
    plugin = GradientAccumulationPlugin(num_steps=2, adjust_scheduler=adjust)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin, cpu=True)
    model, optimizer = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, DataLoader(range(6)))
    for _ in loader:
        with accelerator.accumulate(model):
            optimizer.step()
            scheduler.step()
    assert scheduler.last_epoch == (6 if adjust else 3)


def test_one_cycle_is_not_stepped_beyond_its_end():
    accelerator = Accelerator(cpu=True)
    _, optimizer = parts()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    for _ in range(6):
        optimizer.step()
        scheduler.step()


# Preparing


def test_prepare_returns_the_kinds_that_accelerate_returns_and_leaves_the_rest():
    accelerator = Accelerator(cpu=True)
    model, optimizer = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    other = object()
    prepared = accelerator.prepare(scheduler, other, model, optimizer, DataLoader(range(2)))
    assert prepared[1] is other and prepared[2] is model
    assert isinstance(prepared[3], torch.optim.Optimizer) and isinstance(prepared[4], DataLoader)
    assert prepared[0].optimizers == [prepared[3]]  # found although it stood first
    again = accelerator.prepare(*prepared)
    assert all(a is b for a, b in zip(prepared, again, strict=True))
    assert [len(kept) for kept in (accelerator._models, accelerator._optimizers, accelerator._schedulers)] == [1, 1, 1]
    assert accelerator.prepare(model) is model
    with pytest.raises(ValueError, match="1 entries for 2 objects"):
        accelerator.prepare(model, optimizer, device_placement=[True])


def test_a_single_process_without_mixed_precision_trains_the_scripts_own_model():
    model, _ = parts()
    prepared = Accelerator(cpu=True).prepare(model)
    assert prepared is model and "forward" not in vars(model)


def test_a_prepared_optimizer_is_an_optimizer_for_schedulers_pickle_and_copy():
    accelerator = Accelerator(cpu=True)
    model, optimizer = parts()
    optimizer = accelerator.prepare(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model.weight.grad = torch.ones_like(model.weight)
    clone = pickle.loads(pickle.dumps(copy.deepcopy(accelerator.prepare(parts()[1]))))
    assert clone.state_dict()["param_groups"][0]["lr"] == 0.1
    optimizer.param_groups[0]["lr"] = 0.5
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.5


def test_a_compiled_model_keeps_its_names():
    accelerator = Accelerator(dynamo_backend="eager", cpu=True)
    model, _ = parts()
    prepared = accelerator.prepare(model)
    assert prepared(torch.ones(2, 4, dtype=torch.float64)).shape == (2, 1)
    assert list(accelerator.get_state_dict(prepared)) == ["weight", "bias"]
    wrapped = torch.nn.DataParallel(torch.compile(model, backend="eager"))
    assert accelerator.unwrap_model(wrapped, keep_torch_compile=False) is model
    assert list(accelerator.get_state_dict(wrapped)) == ["weight", "bias"]
    outside = torch.compile(torch.nn.DataParallel(model), backend="eager")
    assert accelerator.unwrap_model(outside) is model
    with pytest.raises(NotImplementedError, match="dynamo_plugin"):
        Accelerator(dynamo_plugin=object(), cpu=True)


def test_what_scripts_ask_before_they_use_a_part_that_is_not_here():
    accelerator = Accelerator(cpu=True)
    assert accelerator.state.deepspeed_plugin is accelerator.state.fsdp_plugin is None
    assert accelerator.distributed_type not in (DistributedType.XLA, DistributedType.DEEPSPEED, DistributedType.FSDP)
    assert common.accelerator.__version__.startswith("1.")
    accelerator.get_tracker("tensorboard").log({"loss": 1.0})  # no tracker runs: nothing happens


class Dataset:
    """What datasets.Dataset does: rows by `select`, a column by its name, and a slice is a dict of columns."""

    def __init__(self, texts):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, key):
        return self.texts if key == "text" else {"text": self.texts[key]}

    def with_format(self, kind):
        return self

    def select(self, rows):
        return Dataset([self.texts[row] for row in rows])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("n", [0, 1, 2, 5, 6, 7])
def test_inputs_are_split_in_order_and_padded_with_the_last(n, padded):
    state = PartialState(cpu=True)
    state.num_processes, shares = 3, []
    for state.process_index in range(3):
        numbers = list(range(n))
        inputs = {"list": numbers, "tensor": torch.arange(n), "rows": torch.arange(n)[:, None] + torch.zeros(2)}
        with state.split_between_processes(inputs, padded) as share:
            assert share["tensor"].tolist() == share["rows"][:, 1].tolist() == share["list"]
        with state.split_between_processes("abcdefg"[:n], padded) as text:
            assert text == "".join("abcdefg"[number] for number in share["list"])
        with state.split_between_processes(tuple(numbers), padded) as several:
            assert several == tuple(share["list"])
        shares.append(share["list"])
    least, extra = divmod(n, 3)
    sizes = [least + (rank < extra or (padded and extra > 0)) for rank in range(3)]
    assert [len(share) for share in shares] == sizes
    real = [share[: least + (rank < extra)] for rank, share in enumerate(shares)]
    assert [number for share in real for number in share] == list(range(n))
    assert all(set(share[least + (rank < extra) :]) <= {n - 1} for rank, share in enumerate(shares))


def test_a_dataset_with_columns_is_split_by_rows():
    state = PartialState(cpu=True)
    state.num_processes, state.process_index = 2, 1
    with state.split_between_processes(Dataset(list("abc")), apply_padding=True) as share:
        assert isinstance(share, Dataset) and share["text"] == ["c", "c"]


def test_free_memory_forgets_what_was_prepared():
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*parts())
    model, optimizer = accelerator.free_memory(model, optimizer)
    assert model is None and optimizer is None and not accelerator._models and not accelerator._optimizers


# Gathering in a single process


def test_gather_for_metrics_takes_one_row_per_sample():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(5), batch_size=2))
    rows = []
    for batch in loader:
        losses = accelerator.gather_for_metrics(batch.float().mean().repeat(2))  # a much used idiom
        rows.append(len(losses))
        assert torch.equal(accelerator.gather_for_metrics(batch), batch)
        names = [f"sample {i}" for i in batch.tolist()]
        nested = accelerator.gather_for_metrics({"x": batch, "names": names, "pair": (batch, [batch])})
        assert nested["names"] == names and torch.equal(nested["pair"][1][0], batch)
        records = [{"id": i} for i in batch.tolist()]
        assert accelerator.gather_for_metrics(records) == records
        with pytest.raises(ValueError, match="scalar"):
            # https://github.com/huggingface/trl/issues/7010: repeated samples are already in it.
            accelerator.gather_for_metrics(batch.float().mean())
        with pytest.raises(TypeError, match="one entry per sample"):
            accelerator.gather_for_metrics("text")
    assert rows == [2, 2, 1]
    assert accelerator.gather_for_metrics(torch.tensor(3.0)) == 3  # outside a loop nothing can be repeated
    for _ in loader:
        pass
    assert loader.end_of_dataloader is False


def test_too_few_rows_are_an_error_not_a_wrong_metric():
    accelerator = Accelerator(cpu=True)
    (loader,) = [accelerator.prepare(DataLoader(range(5), batch_size=3))]
    for batch in loader:
        if len(batch) == 2:
            with pytest.raises(ValueError, match="1 rows for a batch with 2 samples"):
                accelerator.gather_for_metrics(batch[:1])


# Settings


def test_what_is_out_of_scope_is_refused_by_name_and_an_empty_setting_passes(monkeypatch):
    for option in ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin", "parallelism_config"):
        Accelerator(cpu=True, **{option: {}})
        with pytest.raises(NotImplementedError, match=option):
            Accelerator(cpu=True, **{option: object()})
    with pytest.raises(TypeError, match="unexpected"):
        Accelerator(cpu=True, unexpected=1)
    with pytest.raises(NotImplementedError, match="fp8"):
        Accelerator(mixed_precision="fp8", cpu=True)
    with pytest.raises(NotImplementedError, match="KwargsHandler"):
        Accelerator(kwargs_handlers=[KwargsHandler()], cpu=True)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(NotImplementedError, match="ACCELERATE_USE_FSDP"):
        Accelerator(cpu=True)


def test_contradictory_settings_are_refused():
    with pytest.raises(ValueError, match="mixed_precision"):
        Accelerator(mixed_precision="int3", cpu=True)
    with pytest.raises(ValueError, match="gradient_accumulation"):
        Accelerator(gradient_accumulation_steps=2, gradient_accumulation_plugin=GradientAccumulationPlugin(2), cpu=True)
    with pytest.raises(ValueError, match="at least one micro-batch, not 0"):
        Accelerator(gradient_accumulation_steps=0, cpu=True)
    with pytest.raises(ValueError, match="only pass one of each kind"):
        Accelerator(kwargs_handlers=[AutocastKwargs(), AutocastKwargs()], cpu=True)
    Accelerator(mixed_precision="bf16", cpu=True)
    with pytest.raises(ValueError, match="already runs with 'bf16'"):
        Accelerator(mixed_precision="no", cpu=True)


def test_settings_of_the_launcher_are_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    accelerator = Accelerator(cpu=True)
    assert accelerator.mixed_precision == "bf16" and accelerator.gradient_accumulation_steps == 4
    assert accelerator.dynamo_backend == "eager"


def test_handlers_give_only_what_differs_from_the_defaults():
    theirs = pytest.importorskip("accelerate.utils")
    for name, kwargs in {
        "GradScalerKwargs": {"growth_interval": 5},
        "AutocastKwargs": {"cache_enabled": False},
        "InitProcessGroupKwargs": {"backend": "gloo"},
        "DistributedDataParallelKwargs": {"find_unused_parameters": True},
        "GradientAccumulationPlugin": {"num_steps": 3, "sync_each_batch": True},
    }.items():
        import common.accelerator.utils as ours

        assert getattr(ours, name)().to_kwargs() == getattr(theirs, name)().to_kwargs() == {}
        assert getattr(ours, name)(**kwargs).to_kwargs() == getattr(theirs, name)(**kwargs).to_kwargs()
    assert GradScalerKwargs().to_kwargs() == {} and InitProcessGroupKwargs().timeout.total_seconds() == 600


def test_split_batches_and_the_dataloader_configuration_reach_the_loaders():
    shared = DataLoaderConfiguration(even_batches=False, data_seed=3)
    accelerator = Accelerator(dataloader_config=shared, split_batches=True, cpu=True)
    assert accelerator.split_batches and not accelerator.even_batches and not shared.split_batches
    loader = accelerator.prepare(DataLoader(range(4), shuffle=True))
    assert get_sampler(loader).initial_seed == 3


def test_folders_of_the_project(tmp_path):
    accelerator = Accelerator(project_dir=tmp_path, cpu=True)
    assert accelerator.project_dir == accelerator.logging_dir == tmp_path and accelerator.save_iteration == 0
    config = ProjectConfiguration(project_dir=tmp_path, logging_dir=tmp_path / "logs", iteration=3)
    accelerator = Accelerator(project_config=config, cpu=True)
    assert accelerator.logging_dir == tmp_path / "logs" and accelerator.save_iteration == 3


def test_an_accelerator_after_end_training_starts_afresh():
    first = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=3, cpu=True)
    first.end_training()
    assert first.is_main_process and first.mixed_precision == "bf16"
    second = Accelerator(mixed_precision="no", cpu=True)
    assert second.mixed_precision == "no" and second.gradient_accumulation_steps == 1


def test_triggers():
    accelerator = Accelerator(cpu=True)
    assert not accelerator.check_trigger()
    accelerator.set_trigger()
    assert accelerator.check_trigger() and not accelerator.check_trigger()
