"""Level 03 with what a long training adds: gradient accumulation, mixed precision, and checkpoints to resume from.

    python 03_accelerate/train_full.py --gradient-accumulation-steps 4 --mixed-precision bf16
    torchrun --standalone --nproc-per-node 2 03_accelerate/train_full.py --checkpoint-dir checkpoints
    python -m common.accelerator launch --config_file 03_accelerate/two_processes.yaml 03_accelerate/train_full.py

The same file runs on Hugging Face Accelerate: replace `common.accelerator` by `accelerate`.
"""

import torch
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader

from common.accelerator import Accelerator
from common.accelerator.utils import (
    DataLoaderConfiguration,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    gather_object,
    set_seed,
)
from common.args import parse_args
from common.data import check_same_dataset, collate, load_data
from common.model import build_model
from common.process_group import abort_on_error
from common.run import Run
from common.run.checkpointing import checkpoint_session


def train(args):
    accelerator = Accelerator(  # finds rank, world size, device, backend and threads by itself
        cpu=args.device.type == "cpu",
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        project_config=ProjectConfiguration(args.checkpoint_dir, automatic_checkpoint_naming=True, total_limit=2),
        dataloader_config=DataLoaderConfiguration(
            split_batches=True,  # the batch of a loader is the global one
            use_seedable_sampler=True,  # epoch e is ordered by data_seed + e
            data_seed=args.seed,
            non_blocking=True,
        ),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=args.timeout)],
    )
    # SIGTERM and Ctrl-C save a checkpoint first.
    with abort_on_error(), checkpoint_session(args, accelerator.device) as checkpoints:
        result = train_rank(args, accelerator, accelerator.device, checkpoints)
    accelerator.end_training()
    return result


def train_rank(args, accelerator, device, checkpoints):
    train_set, test_set = load_data(args)
    check_same_dataset(gather_object([train_set.description]))  # each machine has looked for MNIST on its own disk
    # Only from pinned memory can a batch be copied to the GPU while the CPU goes on.
    pinned = train_set.device.type != device.type
    loading = {"collate_fn": collate, "num_workers": args.num_workers, "pin_memory": pinned}
    micro_batch = args.batch_size // args.gradient_accumulation_steps
    train_loader = DataLoader(train_set, micro_batch, shuffle=True, drop_last=True, **loading)
    test_loader = DataLoader(test_set, micro_batch, **loading)

    model = build_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    # The model moves to its device and into DDP, the loaders deal out shards and copy them to the device.
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    set_seed(args.seed, device_specific=True)  # for dropout, and each rank draws its own

    # Its loops yield the batches as they are. It counts, takes the time, ends at --max-steps, and reports.
    run = Run(args, train_set, test_set, device)
    if accelerator.is_main_process:  # once, not once per process
        print(run.plan, flush=True)
    accelerator.register_for_checkpointing(run)
    if checkpoints.can_resume(prefix="checkpoint_", subfolder="checkpoints"):  # rank 0 looks: all resume, or none
        accelerator.load_state()  # the newest that is whole
        run.report_resumption()
    for epoch in run.epochs():
        train_loader.set_epoch(epoch)  # another order for each epoch
        loader = train_loader
        if run.batches_done > 0:  # the checkpoint was made within this epoch
            loader = accelerator.skip_first_batches(train_loader, run.batches_done)
        model.train()
        for images, targets in run.batches(loader):
            with accelerator.accumulate(model):  # averages gradients at the last micro-batch of a step only
                loss = F.nll_loss(model(images), targets)
                accelerator.backward(loss)  # divided by the number of micro-batches, scaled under fp16
                optimizer.step()
                optimizer.zero_grad()
            run.count(loss)  # added up on the device: to read it, the CPU would wait for the GPU at every step
            if accelerator.sync_gradients:  # the step is complete
                checkpoints.ask_all_ranks(run.steps)  # has any rank got a signal?
                if checkpoints.is_due(run.steps, run.total_steps):
                    run.demand_finite(model)
                    run.average_losses()  # what rank 0 saves must do for all ranks
                    accelerator.project_configuration.iteration = run.steps  # the number in the checkpoint's name
                    accelerator.save_state()
                    checkpoints.report_saved(run.steps)
                    checkpoints.exit_if_preempted(run.steps)
        train_loss = accelerator.reduce(run.mean_loss(), reduction="mean")

        model.eval()
        # Sums, not means: batches differ in size, and a mean of their means would weigh them alike.
        totals = torch.zeros(3, dtype=torch.float64, device=device)
        with torch.no_grad():
            for images, targets in run.eval_batches(test_loader):
                # From all ranks, without the samples that were repeated to make the shards equally long.
                log_probs, targets = accelerator.gather_for_metrics((model(images), targets))
                totals[0] += F.nll_loss(log_probs, targets, reduction="sum")
                totals[1] += (log_probs.argmax(dim=1) == targets).sum()
                totals[2] += len(targets)
    result = run.result(train_loss, totals, gather_object([run.peak_memory_bytes()]))
    if accelerator.is_main_process:
        run.report(result, accelerator.unwrap_model(model))
    return result


@record  # torchrun then shows the traceback of the rank that failed first
def main():
    train(parse_args(__file__))


if __name__ == "__main__":
    main()
