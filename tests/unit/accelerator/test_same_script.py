"""One script on the core and on Accelerate itself: the same weights, learning rates and metrics."""

import importlib
import itertools

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from common.processes import ranks
from tests.states import OURS, THEIRS, forget_states

pytest.importorskip("accelerate")
N, GLOBAL_BATCH = 50, 12


def script(library, accumulation, split, precision="no"):
    """What level 03 does: RandomSampler's `num_samples` drops the tail, so that every step has the whole batch."""
    root, utils = importlib.import_module(library), importlib.import_module(f"{library}.utils")
    config = root.DataLoaderConfiguration(split_batches=split, use_seedable_sampler=True, data_seed=7)
    accelerator = root.Accelerator(
        gradient_accumulation_steps=accumulation, dataloader_config=config, mixed_precision=precision, cpu=True
    )
    utils.set_seed(3)
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float64 if precision == "no" else torch.float32
    data = TensorDataset(*(torch.randn(N, width, generator=generator, dtype=dtype) for width in (4, 1)))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=8 * 2)
    sampler = RandomSampler(data, num_samples=N // GLOBAL_BATCH * GLOBAL_BATCH)
    size = GLOBAL_BATCH // accumulation // (1 if split else accelerator.num_processes)
    loader, evaluation = DataLoader(data, batch_size=size, sampler=sampler), DataLoader(data, batch_size=8)
    model, optimizer, scheduler, loader, evaluation = accelerator.prepare(
        model, optimizer, scheduler, loader, evaluation
    )
    steps, rates = 0, []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            steps += accelerator.sync_gradients
            rates.append(scheduler.get_last_lr()[0])
    rows = []
    with torch.no_grad():
        for x, y in evaluation:
            rows.append(accelerator.gather_for_metrics((model(x), y)))
    weights = accelerator.unwrap_model(model).state_dict()
    result = (
        {name: value.clone() for name, value in weights.items()},
        rates,
        [torch.cat(c) for c in zip(*rows, strict=True)],
    )
    reduced = accelerator.reduce(torch.tensor([1.0, 2.0]), "mean"), accelerator.gather(torch.tensor([steps]))
    padded = accelerator.pad_across_processes(torch.ones(accelerator.process_index + 1, 2), pad_index=5)
    accelerator.end_training()
    forget_states(library)
    return *result, steps, reduced, padded


def assert_equal(ours, theirs):
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-12)
    assert ours[1] == pytest.approx(theirs[1]) and ours[3] == theirs[3] == 8
    for ours_part, theirs_part in zip((*ours[2], *ours[4], ours[5]), (*theirs[2], *theirs[4], theirs[5]), strict=True):
        torch.testing.assert_close(ours_part, theirs_part, rtol=0, atol=1e-12)
    assert len(ours[2][0]) == N


@pytest.mark.parametrize(("accumulation", "split"), list(itertools.product((1, 3), (False, True))))
def test_a_script_gives_the_same_on_both_libraries_in_one_process(accumulation, split):
    assert_equal(script(OURS, accumulation, split), script(THEIRS, accumulation, split))


@pytest.mark.parametrize(("accumulation", "split"), [(1, True), (3, False)])
def test_a_script_gives_the_same_on_both_libraries_in_two_processes(accumulation, split):
    ours, theirs = (ranks(2).run(script, library, accumulation, split) for library in (OURS, THEIRS))
    for one, other in zip(ours, theirs, strict=True):
        assert_equal(one, other)


def test_a_script_gives_the_same_in_bfloat16():
    ours, theirs = script(OURS, 1, False, "bf16"), script(THEIRS, 1, False, "bf16")
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=0)


def test_the_accelerator_has_accelerates_methods_and_properties():
    from accelerate import Accelerator as Theirs

    from common.accelerator import Accelerator

    left_out = {
        "context_parallel_rank",
        "data_parallel_rank",
        "data_parallel_shard_rank",
        "deepspeed_ulysses_dl_adapter",
        "fp8_backend",
        "lomo_backward",
        "pipeline_parallel_rank",
        "tensor_parallel_rank",
    }
    public = {name for name in dir(Theirs) if not name.startswith("_")}
    assert public - set(dir(Accelerator)) == left_out
