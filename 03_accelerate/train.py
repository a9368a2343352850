"""Level 03: an Accelerator. It knows the ranks, the device, the shards and the collectives; the loop stays ours.

As one process, as several, or as a configuration file says (--mixed-precision, --gradient-accumulation-steps,
--checkpoint-dir do what their names say):

    python 03_accelerate/train.py
    torchrun --standalone --nproc-per-node 2 03_accelerate/train.py
    python -m common.accelerator launch --config_file 03_accelerate/two_processes.yaml 03_accelerate/train.py

The same file runs on Hugging Face Accelerate: replace `common.accelerator` by `accelerate`.
"""

import torch
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader

from common.accelerator import Accelerator
from common.accelerator.utils import DataLoaderConfiguration, InitProcessGroupKwargs, ProjectConfiguration, set_seed
from common.args import parse_args
from common.data import collate, load_data
from common.model import build_model
from common.report import Run


def train(args):
    accelerator = Accelerator(  # finds rank, world size, device and backend by itself
        cpu=args.device.type == "cpu",
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=args.seed),
        project_config=ProjectConfiguration(args.checkpoint_dir, automatic_checkpoint_naming=True, total_limit=2),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=args.timeout)],
    )
    try:
        return train_rank(args, accelerator, accelerator.device)
    finally:
        accelerator.end_training()


def train_rank(args, accelerator, device):
    train_set, test_set = load_data(args)
    micro_batch = args.batch_size // args.gradient_accumulation_steps
    loading = {"batch_size": micro_batch, "collate_fn": collate, "num_workers": args.num_workers}
    train_loader = DataLoader(train_set, shuffle=True, drop_last=True, **loading)
    test_loader = DataLoader(test_set, **loading)

    model = build_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    # The model moves to its device and into DDP, the loaders deal out shards.
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    set_seed(args.seed, device_specific=True)  # for dropout

    run = Run(args, train_set, test_set, device)
    accelerator.register_for_checkpointing(run)
    if run.can_resume:
        accelerator.load_state()
    for epoch in run.epochs():
        train_loader.set_epoch(epoch)  # another order for each epoch
        model.train()
        for images, targets in run.batches(train_loader):
            with accelerator.accumulate(model):  # averages gradients at the last micro-batch of a step only
                loss = F.nll_loss(model(images), targets)
                accelerator.backward(loss)  # divided by the number of micro-batches, scaled under fp16
                optimizer.step()
                optimizer.zero_grad()
            run.count(loss)  # not loss.item(): the CPU would wait for the GPU at every step
            if run.wants_checkpoint():
                accelerator.save_state()
        train_loss = accelerator.reduce(run.mean_loss(), reduction="mean")

        model.eval()
        # Sums, not means: batches differ in size, and a mean of their means would weigh them alike.
        totals = torch.zeros(3, dtype=torch.float64, device=device)
        with torch.no_grad():
            for images, targets in test_loader:
                # From all ranks, without the samples that were repeated to make them equally long.
                log_probs, targets = accelerator.gather_for_metrics((model(images), targets))
                totals[0] += F.nll_loss(log_probs, targets, reduction="sum")
                totals[1] += (log_probs.argmax(dim=1) == targets).sum()
                totals[2] += len(targets)
    return run.result(accelerator.unwrap_model(model), train_loss, totals)


@record  # torchrun then shows the traceback of the rank that failed first
def main():
    train(parse_args(__file__))


if __name__ == "__main__":
    main()
