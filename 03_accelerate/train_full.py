"""Level 03 with what a long training adds: gradient accumulation, mixed precision, and checkpoints to resume from.

    python 03_accelerate/train_full.py --gradient-accumulation-steps 4 --mixed-precision bf16
    torchrun --standalone --nproc-per-node 2 03_accelerate/train_full.py --checkpoint-dir checkpoints
    python -m common.accelerator launch --config_file 03_accelerate/two_processes.yaml 03_accelerate/train_full.py

With --checkpoint-dir, SIGTERM and Ctrl-C save a checkpoint within ten further steps, if the training has so many left,
and the same command continues a run that was stopped or killed.
The same file runs on Hugging Face Accelerate: replace `common.accelerator` by `accelerate`.
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler

from common.accelerator import Accelerator
from common.accelerator.utils import DataLoaderConfiguration, InitProcessGroupKwargs, ProjectConfiguration, set_seed
from common.args import parse_args
from common.checkpoints.checks import SameTraining, has_checkpoint, refuse_longer_training, refuse_not_finite
from common.checkpoints.schedule import CheckpointSchedule
from common.checkpoints.signals import caught_signals, stop_run
from common.data import collate, load_data
from common.instruments import measured
from common.model import build_model
from common.start import prepare_process


@torch.no_grad()
def evaluate(accelerator, model, loader):
    # Sums, not means: batches differ in size, and a mean of their means would weigh them alike.
    loss_sum, correct, evaluated = torch.zeros(3, dtype=torch.float64, device=accelerator.device)
    model.eval()
    for images, targets in loader:
        log_probs, targets = accelerator.gather_for_metrics((model(images), targets))  # of all ranks, no sample twice
        loss_sum += F.nll_loss(log_probs, targets, reduction="sum")
        correct += (log_probs.argmax(dim=1) == targets).sum()
        evaluated += len(targets)
    return (loss_sum / evaluated).item(), (correct / evaluated).item(), evaluated.item()


def train(args):
    accelerator = Accelerator(  # joins the other processes; finds rank, device and backend by itself
        cpu=args.device.type == "cpu",  # by default a GPU, where there is one
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        project_config=ProjectConfiguration(args.checkpoint_dir, automatic_checkpoint_naming=True, total_limit=2),
        dataloader_config=DataLoaderConfiguration(
            split_batches=True,  # by default a loader's batch size is that of each rank
            use_seedable_sampler=True,  # epoch e is ordered by data_seed + e
            data_seed=args.seed,
            non_blocking=True,  # a GPU computes while pinned batches are copied to it
        ),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=args.timeout)],
    )
    device = accelerator.device
    train_set, test_set = load_data(args)
    loading = dict(collate_fn=collate, num_workers=args.num_workers, pin_memory=train_set.device.type != device.type)
    micro_batch = args.batch_size // args.gradient_accumulation_steps
    steps_per_epoch = len(train_set) // args.batch_size
    # An epoch is whole steps. drop_last would keep micro-batches at its end that are too few for a step.
    sampler = RandomSampler(train_set, num_samples=steps_per_epoch * args.batch_size)
    train_loader = DataLoader(train_set, micro_batch, sampler=sampler, **loading)
    test_loader = DataLoader(test_set, micro_batch, **loading)  # prepare gives all ranks equal parts of a batch

    model = build_model(args)  # prepare moves it to its device and into DDP; the optimizer keeps its parameters
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    set_seed(args.seed, device_specific=True)  # for dropout: each rank draws its own random numbers

    progress = Progress(steps_per_epoch, device)
    accelerator.register_for_checkpointing(progress, SameTraining(args.batch_size, args.seed, train_set))
    saves = bool(args.checkpoint_dir)
    resumes = saves and has_checkpoint(args.checkpoint_dir, "checkpoints/checkpoint_*")
    if resumes:
        resume(accelerator, progress, args)

    with caught_signals(enabled=saves) as signals, measured(args, model, train_set, test_set, resumes) as report:
        schedule = CheckpointSchedule(args.checkpoint_every, steps_per_epoch * args.epochs, signals, device)
        for epoch in range(progress.unfinished_epoch, args.epochs):
            train_loader.set_epoch(epoch)  # another order for each epoch
            model.train()
            steps_done = progress.step - epoch * steps_per_epoch
            for images, targets in skip_trained(accelerator, train_loader, steps_done):
                with accelerator.accumulate(model):  # averages gradients at the last micro-batch of a step only
                    loss = F.nll_loss(model(images), targets)
                    accelerator.backward(loss)  # divided by the number of micro-batches, scaled under fp16
                    optimizer.step()
                    optimizer.zero_grad()
                progress.loss_sum += loss.detach() / args.gradient_accumulation_steps
                if accelerator.sync_gradients:  # the step is complete
                    progress.step += 1
                    if saves:
                        decision = schedule.decide(progress.step)  # the same on all ranks
                        if decision.save:
                            save(accelerator, model, progress)
                        if decision.stop:
                            stop_run(progress.step, signals)  # ends the process

            train_loss = accelerator.reduce(progress.loss_sum, reduction="mean").item() / steps_per_epoch
            progress.loss_sum.zero_()
            result = report(train_loss, *evaluate(accelerator, model, test_loader), steps=progress.step)
    accelerator.end_training()
    return result


class Progress:
    """The place that the training has come to. Checkpoints hold it beside weights, optimizer and random numbers.

    Attributes:
        step: the number of optimizer steps so far.
        loss_sum: this rank's losses of the steps of this epoch, added up on the device.
    """

    def __init__(self, steps_per_epoch, device):
        self.steps_per_epoch = steps_per_epoch
        self.step = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def unfinished_epoch(self):
        # An epoch ends with its evaluation. A checkpoint of its last step is made before that, and still belongs to it.
        return max(self.step - 1, 0) // self.steps_per_epoch

    def state_dict(self):
        return {"step": self.step, "loss_sum": self.loss_sum.item()}

    def load_state_dict(self, state):
        self.step = state["step"]
        self.loss_sum.fill_(state["loss_sum"])


def resume(accelerator, progress, args):
    accelerator.load_state()  # the newest checkpoint that is whole: also `progress`, and random numbers
    # The count of `accumulate` has come with it. This run may accumulate another number of micro-batches, so it begins
    # a window of its own. The last one of the saved run was whole: `save` follows a step.
    accelerator.step = 0
    refuse_longer_training(args.epochs, progress.step, progress.steps_per_epoch)
    if accelerator.is_main_process:  # accelerator.print would print on each machine
        print(f"{args.level}: resumed at step {progress.step}")


def skip_trained(accelerator, loader, steps_done):
    if steps_done == 0:
        return loader
    return accelerator.skip_first_batches(loader, steps_done * accelerator.gradient_accumulation_steps)


def save(accelerator, model, progress):
    refuse_not_finite(model, progress.step)
    # A checkpoint holds one sum for all ranks. Each goes on from the mean of their sums, which keeps that mean right.
    progress.loss_sum = accelerator.reduce(progress.loss_sum, reduction="mean")
    # The checkpoint's name has the number of the step. By default save_state counts its calls. On Accelerate a resumed
    # run would begin at 0 again, and meet names that are there already.
    accelerator.project_configuration.iteration = progress.step
    accelerator.save_state(all_ranks=True)  # a full disk raises an error on all of them; Accelerate ignores `all_ranks`
    if accelerator.is_main_process:
        print(f"saved at step {progress.step}")


if __name__ == "__main__":
    args = prepare_process(parse_args(__file__))  # device, cores and memory, before torch computes
    train(args)
