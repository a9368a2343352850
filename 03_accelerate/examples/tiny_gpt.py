r"""A small GPT that learns the pages of this repository, letter by letter, and writes a line at the end.

    python 03_accelerate/examples/tiny_gpt.py
    torchrun --standalone --nproc-per-node 2 03_accelerate/examples/tiny_gpt.py

By DDP each process has the whole model. By FSDP each has half of it, and gathers a block while it computes:

    python -m common.accelerator launch --config_file 03_accelerate/fsdp_two_processes.yaml \
        --fsdp_auto_wrap_policy transformer_based_wrap --fsdp_transformer_layer_cls_to_wrap Block \
        03_accelerate/examples/tiny_gpt.py

Lines differ in length, so that processes have different numbers of letters: see `mean_loss`.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from common.accelerator import Accelerator
from common.accelerator.utils import DataLoaderConfiguration, set_seed

PAGES = ("*.md", "0*/*.md", "common/**/*.md", "benchmarks/*.md")
LETTERS = 128  # of ASCII
PADDING = 0  # no letter


class Block(nn.Module):
    """Causal attention, then two layers for each letter by itself; both are added to what comes in."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        by_head = self.queries_keys_values(self.norm_1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*by_head, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class TinyGPT(nn.Module):
    def __init__(self, length, checkpointing=False, width=128, depth=4, heads=4):
        super().__init__()
        self.checkpointing = checkpointing
        self.letters = nn.Embedding(LETTERS, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, LETTERS, bias=False)
        nn.init.normal_(self.letters.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.head.weight = self.letters.weight  # tied: one parameter, in two layers

    def forward(self, letters):
        places = torch.arange(letters.shape[1], device=letters.device)
        x = self.letters(letters) + self.positions(places)
        for block in self.blocks:
            # A checkpoint keeps x alone of what the block computes, which it computes again in backward.
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(self.norm(x))


def read_lines(folder, length):
    """The lines of the pages, each a tensor of up to `length` letters and the one that follows them."""
    lines = []
    for pattern in PAGES:
        for page in sorted(folder.glob(pattern)):
            for line in page.read_text(encoding="utf-8").splitlines():
                letters = line.strip().encode("ascii", errors="ignore")
                if len(letters) > 20:
                    lines.append(torch.tensor(list(letters + b"\n")[: length + 1]))
    return lines


def pad(lines):
    return pad_sequence(lines, batch_first=True, padding_value=PADDING)


def mean_loss(accelerator, model, lines):
    """The mean over the letters of all processes, to which each process gives its own letters' share."""
    targets = lines[:, 1:]
    logits = model(lines[:, :-1]).flatten(0, 1)
    losses = F.cross_entropy(logits, targets.flatten(), ignore_index=PADDING, reduction="sum")
    # losses / (targets != PADDING).sum() is the mean over a process's own letters. A letter would count the more, the
    # fewer its process has: on two processes up to 1.27 times as much as one of the other process.
    num_letters = accelerator.reduce((targets != PADDING).sum(), reduction="sum")
    return losses / num_letters * accelerator.num_processes  # because gradients are averaged over the processes


@torch.no_grad()
def write(model, start, num_letters, device):
    """`start` and what the model writes after it. All processes call this: under FSDP a forward is a collective."""
    generator = torch.Generator().manual_seed(0)
    letters = torch.tensor([list(start.encode())], device=device)
    model.eval()
    for _ in range(num_letters):
        probabilities = torch.softmax(model(letters)[0, -1] / 0.6, dim=0)
        following = torch.multinomial(probabilities.cpu(), 1, generator=generator)
        letters = torch.cat([letters, following.to(device)[None]], dim=1)
    return bytes(letters[0].tolist()).decode()


def train(args):
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision=args.mixed_precision,
        log_with=args.tracker,
        project_dir=args.output_dir,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=args.seed),
    )
    set_seed(args.seed)
    lines = read_lines(args.pages, args.length)
    if len(lines) < args.batch_size:
        raise SystemExit(f"{len(lines)} lines do not fill a batch of {args.batch_size}")
    loader = DataLoader(lines, args.batch_size, shuffle=True, drop_last=True, collate_fn=pad)
    model = TinyGPT(args.length, args.checkpointing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.print(f"{len(lines)} lines, {accelerator.num_processes} × {accelerator.distributed_type.value}")

    accelerator.init_trackers("tiny_gpt", config={"lr": args.lr, "batch_size": args.batch_size})
    losses = []
    while len(losses) < args.max_steps:
        for batch in loader:
            loss = mean_loss(accelerator, model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
            if len(losses) % args.log_every == 0:
                accelerator.print(f"step {len(losses)}: loss {losses[-1]:.4f}")
                accelerator.log({"loss": losses[-1]}, step=len(losses))
            if len(losses) == args.max_steps:
                break
    sample = write(model, "The ", args.length - 4, accelerator.device)
    accelerator.print(sample)
    if args.output_dir:
        accelerator.save_model(model, args.output_dir)
    accelerator.end_training()
    return {"losses": losses, "sample": sample}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32, help="lines of all processes together")
    parser.add_argument("--length", type=int, default=96, help="letters of a line")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--mixed-precision", choices=["no", "bf16"])
    parser.add_argument("--checkpointing", action="store_true", help="keep less, and compute the blocks twice")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--tracker", help="jsonl or tensorboard; its files need --output-dir")
    parser.add_argument("--pages", type=Path, default=Path(__file__).resolve().parents[2], help="a folder of .md files")
    parser.add_argument("--output-dir", help="a folder for the weights and the tracker's files")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
