"""What upstream's examples by feature do, on small local data, for whichever library answers to `accelerate`.

    feature_script.py OUT [FEATURE …]

Each feature leaves what came out of it, weights and metrics, in OUT/<rank>.pt. Imports nothing of this repository.
"""

import copy
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import (
    Accelerator,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    ProfileKwargs,
    find_executable_batch_size,
)
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import ProjectConfiguration, gather_object, set_seed
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

TRAINING = 46  # divides neither by the batch nor by the window
EVALUATION = 13
EPOCHS = 2


def make_data(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(count, 5, generator=generator)
    return TensorDataset(points, (points.sum(1) > 0).long())


TRAIN = make_data(TRAINING, 0)
TEST = make_data(EVALUATION, 1)


def loaders(batch_size: int = 4) -> tuple[DataLoader, DataLoader]:
    return DataLoader(TRAIN, batch_size=batch_size, shuffle=True), DataLoader(TEST, batch_size=5)


def make_accelerator(**settings) -> Accelerator:
    """A new accelerator in the same process group, as a script of its own would have it."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, **settings)
    torch.set_num_threads(1)  # The core shares the cores out over the processes, where accelerate leaves one thread.
    set_seed(42)
    return accelerator


def make_training():
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=40)
    return model, optimizer, schedule


def weights(accelerator: Accelerator, model: nn.Module) -> dict[str, torch.Tensor]:
    return copy.deepcopy(accelerator.unwrap_model(model).state_dict())


def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> torch.Tensor:
    """Predictions and labels of the whole test set, each sample once."""
    model.eval()
    seen = []
    for points, labels in loader:
        with torch.no_grad():
            predictions = model(points).argmax(1)
        seen.append(torch.stack(accelerator.gather_for_metrics((predictions, labels))))
    return torch.cat(seen, 1)


def train(accelerator: Accelerator, epochs: int = EPOCHS) -> dict:
    train_loader, test_loader = loaders()
    model, optimizer, schedule = make_training()
    model, optimizer, train_loader, test_loader, schedule = accelerator.prepare(
        model, optimizer, train_loader, test_loader, schedule
    )
    result = {}
    for epoch in range(epochs):
        model.train()
        for points, labels in train_loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(points), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        result[f"predicted {epoch}"] = evaluate(accelerator, model, test_loader)
    return {**result, "weights": weights(accelerator, model), "rate": schedule.get_last_lr()}


def gradient_accumulation(out: Path) -> dict:
    return train(make_accelerator(gradient_accumulation_steps=3))


def automatic_gradient_accumulation(out: Path) -> dict:
    """The batch that fits is found; what is missing to the batch that was wanted is accumulated."""
    wanted = 16
    tried = []

    @find_executable_batch_size(starting_batch_size=wanted)
    def attempt(batch_size: int) -> dict:
        tried.append(batch_size)
        if batch_size > 8:
            raise RuntimeError("CUDA out of memory.")
        return train(make_accelerator(gradient_accumulation_steps=wanted // batch_size), epochs=1)

    return {**attempt(), "tried": tried}


def checkpointing(out: Path) -> dict:
    """A state is saved in the middle of an epoch; a second training goes on from it by skipping batches."""
    accelerator = make_accelerator(
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        project_config=ProjectConfiguration(project_dir=str(out / "project"), automatic_checkpoint_naming=True),
    )
    model, optimizer, schedule = make_training()
    loader, _ = loaders()
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    accelerator.register_for_checkpointing(schedule)

    def step(points: torch.Tensor, labels: torch.Tensor) -> None:
        accelerator.backward(nn.functional.cross_entropy(model(points), labels))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    for index, batch in enumerate(loader):
        step(*batch)
        if index == 1:
            accelerator.save_state()
    straight = weights(accelerator, model)
    accelerator.load_state(str(out / "project" / "checkpoints" / "checkpoint_0"))
    return {"straight": straight, "saved": weights(accelerator, model), "rate": schedule.get_last_lr()}


def cross_validation(out: Path) -> dict:
    folds = []
    for fold in range(3):
        accelerator = make_accelerator()
        held_out = [index for index in range(TRAINING) if index % 3 == fold]
        kept = [index for index in range(TRAINING) if index % 3 != fold]
        model, optimizer, _ = make_training()
        train_loader = DataLoader(Subset(TRAIN, kept), batch_size=4, shuffle=True)
        test_loader = DataLoader(Subset(TRAIN, held_out), batch_size=4)
        model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
        for points, labels in train_loader:
            accelerator.backward(nn.functional.cross_entropy(model(points), labels))
            optimizer.step()
            optimizer.zero_grad()
        folds.append(evaluate(accelerator, model, test_loader))
    return {f"fold {number}": predictions for number, predictions in enumerate(folds)}


def ddp_comm_hook(out: Path) -> dict:
    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    return train(make_accelerator(kwargs_handlers=[handler]), epochs=1)


def early_stopping(out: Path) -> dict:
    """The last process wants to stop; all do, at the same step."""
    accelerator = make_accelerator()
    model, optimizer, _ = make_training()
    loader, _ = loaders()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for points, labels in loader:
        accelerator.backward(nn.functional.cross_entropy(model(points), labels))
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if accelerator.is_last_process and steps == 3:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    return {"steps": steps, "weights": weights(accelerator, model)}


def local_sgd(out: Path) -> dict:
    accelerator = make_accelerator(gradient_accumulation_steps=2)
    model, optimizer, _ = make_training()
    loader, _ = loaders()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as sgd:
        for points, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(points), labels))
                optimizer.step()
                optimizer.zero_grad()
                sgd.step()
    return {"weights": weights(accelerator, model)}


def autoregressive_accumulation(out: Path) -> dict:
    """Each sample of a window weighs the same, however the batches share the samples out."""
    accelerator = make_accelerator(gradient_accumulation_steps=3)
    model, optimizer, _ = make_training()
    loader, _ = loaders()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = iter(loader)
    left = len(loader)
    while left > 0:
        window = [next(batches) for _ in range(min(3, left))]
        left -= len(window)
        in_window = torch.tensor(sum(len(labels) for _, labels in window))
        total = accelerator.gather(in_window).sum().item()
        for index, (points, labels) in enumerate(window):
            last = index == len(window) - 1
            context = torch.enable_grad() if last else accelerator.no_sync(model)
            with context:
                loss = nn.functional.cross_entropy(model(points), labels, reduction="sum")
                accelerator.backward(loss * accelerator.num_processes * accelerator.gradient_accumulation_steps / total)
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(accelerator, model)}


def profiler(out: Path) -> dict:
    """The operations of a few steps are counted; the traces lie where they were asked for."""
    folder = out / f"traces of {os.environ.get('RANK', '0')}"
    accelerator = make_accelerator(kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir=str(folder))])
    model, optimizer, _ = make_training()
    loader, _ = loaders()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    points, labels = next(iter(loader))
    with accelerator.profile() as profile:
        nn.functional.cross_entropy(model(points), labels).backward()
    names = {event.key for event in profile.key_averages()}
    return {"linear": "aten::linear" in names, "traces": sorted(path.name for path in folder.iterdir())}


class Lines(GeneralTracker):
    """A tracker of the script's own."""

    name = "lines"
    requires_logging_directory = False

    @on_main_process
    def __init__(self, run_name: str) -> None:
        super().__init__()
        self.lines = [run_name]

    @property
    def tracker(self):
        return self.lines

    @on_main_process
    def store_init_configuration(self, values: dict) -> None:
        self.lines.append(values)

    @on_main_process
    def log(self, values: dict, step: int | None = None) -> None:
        self.lines.append({**values, "step": step})


def tracking(out: Path) -> dict:
    accelerator = make_accelerator(log_with=Lines("run"))
    accelerator.init_trackers("project", config={"rate": 0.1})
    accelerator.log({"loss": 0.5}, step=1)
    lines = accelerator.get_tracker("lines", unwrap=True) if accelerator.is_main_process else []
    return {"lines": json.dumps(lines)}


def multi_process_metrics(out: Path) -> dict:
    """Objects of any kind, from all processes, in order; and predictions without what was repeated."""
    accelerator = make_accelerator()
    model, _, _ = make_training()
    _, loader = loaders()
    model, loader = accelerator.prepare(model, loader)
    with accelerator.split_between_processes(list(range(5))) as share:
        everything = gather_object([str(number) for number in share])
    return {"predicted": evaluate(accelerator, model, loader), "objects": everything}


FEATURES: dict[str, Callable[[Path], dict]] = {
    "autoregressive_accumulation": autoregressive_accumulation,
    "automatic_gradient_accumulation": automatic_gradient_accumulation,
    "checkpointing": checkpointing,
    "cross_validation": cross_validation,
    "ddp_comm_hook": ddp_comm_hook,
    "early_stopping": early_stopping,
    "gradient_accumulation": gradient_accumulation,
    "local_sgd": local_sgd,
    "multi_process_metrics": multi_process_metrics,
    "profiler": profiler,
    "tracking": tracking,
}


def main(out: Path, chosen: list[str]) -> None:
    results = {}
    for name in chosen or FEATURES:
        results[name] = FEATURES[name](out)
    torch.save(results, out / f"{os.environ.get('RANK', '0')}.pt")
    Accelerator().end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
