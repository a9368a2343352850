"""Scripts that resume in the ways that Accelerate documents end here where they end there.

They are its `by_feature/checkpointing.py` and `complete_nlp_example.py` in small, which have the position in the name
of the checkpoint's folder, and the arithmetic of the training scripts of diffusers.
"""

import importlib
import math
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from common.processes import ranks
from tests.states import OURS, THEIRS, forget_states, reset_states

pytest.importorskip("accelerate")
SAMPLES = 26
BATCH = 2


def prepared(library, order, dropout, accumulation):
    root = importlib.import_module(library)
    loading = root.utils.DataLoaderConfiguration(use_seedable_sampler=order == "seedable", data_seed=3)
    accelerator = root.Accelerator(dataloader_config=loading, gradient_accumulation_steps=accumulation, cpu=True)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(SAMPLES, 3), torch.randn(SAMPLES, 1))
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=200)
    loader = DataLoader(data, batch_size=BATCH, shuffle=order != "sequential")
    return accelerator, *accelerator.prepare(model, optimizer, loader, schedule)


def train_step(accelerator, model, optimizer, schedule, batch):
    x, y = batch
    with accelerator.accumulate(model):
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def by_folder_name(library, folder, resume_from, save_every, order, dropout, calls_set_epoch=False, epochs=3):
    """The loop of `by_feature/checkpointing.py`: folders step_N and epoch_N, and `skip_first_batches`."""
    accelerator, model, optimizer, loader, schedule = prepared(library, order, dropout, 1)
    overall_step = 0
    starting_epoch = 0
    resume_step = None
    if resume_from is not None:
        accelerator.load_state(f"{folder}/{resume_from}")
        if "epoch" in resume_from:
            starting_epoch = int(resume_from.replace("epoch_", "")) + 1
        else:
            resume_step = int(resume_from.replace("step_", ""))
            starting_epoch = resume_step // len(loader)
            resume_step -= starting_epoch * len(loader)
    trained = 0
    for epoch in range(starting_epoch, epochs):
        if calls_set_epoch:
            loader.set_epoch(epoch)
        active = loader
        if epoch == starting_epoch and resume_step is not None:
            active = accelerator.skip_first_batches(loader, resume_step)
            overall_step += resume_step
        for batch in active:
            train_step(accelerator, model, optimizer, schedule, batch)
            overall_step += 1
            trained += 1
            if save_every is not None and save_every != "epoch" and overall_step % save_every == 0:
                accelerator.save_state(f"{folder}/step_{overall_step}")
        if save_every == "epoch":
            accelerator.save_state(f"{folder}/epoch_{epoch}")
    return end(library, accelerator, model, trained)


def of_diffusers(library, folder, resume_from, save_every, order, dropout, accumulation=2, epochs=3):
    """The loop of its `train_text_to_image.py`: the steps of the checkpoint are passed over one by one."""
    accelerator, model, optimizer, loader, schedule = prepared(library, order, dropout, accumulation)
    steps_per_epoch = math.ceil(len(loader) / accumulation)
    global_step = 0
    first_epoch = 0
    resume_step = 0
    if resume_from is not None:
        accelerator.load_state(f"{folder}/{resume_from}")
        global_step = int(resume_from.split("-")[1])
        first_epoch = global_step // steps_per_epoch
        resume_step = global_step * accumulation % (steps_per_epoch * accumulation)
    trained = 0
    for epoch in range(first_epoch, epochs):
        for step, batch in enumerate(loader):
            if resume_from is not None and epoch == first_epoch and step < resume_step:
                continue
            train_step(accelerator, model, optimizer, schedule, batch)
            trained += 1
            if accelerator.sync_gradients:
                global_step += 1
                if save_every is not None and global_step % save_every == 0:
                    accelerator.save_state(f"{folder}/checkpoint-{global_step}")
    return end(library, accelerator, model, trained)


def end(library, accelerator, model, trained):
    accelerator.wait_for_everyone()
    weights = {name: value.clone() for name, value in accelerator.unwrap_model(model).state_dict().items()}
    reset_states(library)
    forget_states(library)
    return weights, trained, torch.rand(())


def resumed(library, processes, script, folder, checkpoint, save_every, **how):
    """What the script comes to on each rank when it is resumed from a checkpoint of its own."""
    calls = ((None, save_every), (checkpoint, None))
    for resume_from, every in calls:
        arguments = (library, str(folder / library), resume_from, every)
        outcomes = [script(*arguments, **how)] if processes == 1 else ranks(processes).run(script, *arguments, **how)
    return outcomes


# An epoch has 13 batches on one process, and 7 on two. A seedable order needs `set_epoch`. The original draws a seed
# more when it resumes: with dropout that would show in orders that do not draw from torch's generator.
SHUFFLED = {"order": "shuffled", "dropout": 0.5}
SEEDABLE = {"order": "seedable", "dropout": 0.0, "calls_set_epoch": True}
CASES = [
    (1, by_folder_name, "step_4", 4, SHUFFLED),
    (1, by_folder_name, "step_13", 13, SHUFFLED),
    (1, by_folder_name, "epoch_0", "epoch", SHUFFLED),
    (1, by_folder_name, "step_8", 4, {"order": "sequential", "dropout": 0.0}),
    (1, by_folder_name, "step_16", 4, SEEDABLE),
    (1, of_diffusers, "checkpoint-7", 7, SHUFFLED),
    (1, of_diffusers, "checkpoint-9", 3, SHUFFLED),
    pytest.param(2, by_folder_name, "step_4", 4, SHUFFLED, marks=pytest.mark.slow),
    pytest.param(2, by_folder_name, "step_7", 7, SHUFFLED, marks=pytest.mark.long),
    pytest.param(2, by_folder_name, "step_16", 4, SEEDABLE, marks=pytest.mark.slow),
    pytest.param(2, of_diffusers, "checkpoint-9", 3, SHUFFLED, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("processes, script, checkpoint, save_every, how", CASES)
def test_a_script_resumes_as_on_accelerate(processes, script, checkpoint, save_every, how, tmp_path):
    ours, theirs = (
        resumed(library, processes, script, tmp_path, checkpoint, save_every, **how) for library in (OURS, THEIRS)
    )
    for (weights, trained, draw), (their_weights, their_trained, their_draw) in zip(ours, theirs, strict=True):
        assert trained == their_trained > 0
        assert all(torch.equal(weights[key], their_weights[key]) for key in their_weights)
        if how["order"] == "shuffled":
            assert draw == their_draw
    assert Path(tmp_path, OURS, checkpoint, "manifest.json").exists()
