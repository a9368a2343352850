"""Published programs on tiny models and made data, of which every step is recorded.

PROGRAMS lists them, each as its own documentation starts it, but small and on the CPU.
`python -m tests.parity.programs NAME LIBRARY FOLDER` runs one on accelerate (`theirs`) or, through the alias, on the
core (`ours`), alone or under torchrun, and writes what rank r did into `FOLDER/rank-r.json`.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.bits import comparable_logs, digest
from tests.parity import alias

STEPS = 3
WORDS = [f"w{number}" for number in range(60)]


class Recorder:
    """The losses of this rank and, after each optimizer step, the weights, the optimizer's state and learning rates."""

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.steps: list[dict[str, Any]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        hook = register_optimizer_step_post_hook(self.note_step)
        with hook, mock.patch.object(Tensor, "backward", self.note_loss(Tensor.backward)):
            yield

    def note_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        rates = [float(group["lr"]).hex() for group in optimizer.param_groups]
        moments = []
        for state in optimizer.state.values():
            moments += [value for value in state.values() if isinstance(value, Tensor)]
        self.steps.append({"weights": digest(*parameters), "moments": digest(*moments), "rates": rates})

    def note_loss(self, backward: Callable) -> Callable:
        def noted(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            self.losses.append(float(loss).hex())
            return backward(loss, *args, **kwargs)

        return noted


# Data and models of the programs.


def sentences(number: int) -> list[str]:
    generator = torch.Generator().manual_seed(7)
    found = []
    for _ in range(number):
        length = int(torch.randint(3, 13, (), generator=generator))
        found.append(" ".join(WORDS[int(word)] for word in torch.randint(60, (length,), generator=generator)))
    return found


def make_images(folder: Path) -> None:
    """120 images of noise, made before the ranks start: they read them in the order in which the folder lists them."""
    from torchvision.io import write_png

    generator = torch.Generator().manual_seed(1)
    folder.mkdir(parents=True)
    for number in range(120):
        write_png(
            torch.randint(256, (3, 16, 16), dtype=torch.uint8, generator=generator), str(folder / f"{number}.png")
        )


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<unk>", "<s>", "</s>"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=fast, model_max_length=32, **names)


def language_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes, **special))


# The programs. Each returns its results in a form that JSON can keep.


def diffusion(folder: Path) -> dict:
    """lucidrains' denoising-diffusion-pytorch: random flips, accumulation, averaged weights, milestones."""
    from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet

    torch.manual_seed(0)
    model = GaussianDiffusion(Unet(dim=8, dim_mults=(1, 2), flash_attn=False), image_size=16, timesteps=10)
    trainer = Trainer(
        model,
        folder / "images",
        train_batch_size=8,
        train_num_steps=STEPS,
        gradient_accumulate_every=2,
        save_and_sample_every=2,
        num_samples=4,
        results_folder=folder / "results",
        # Its default, True, is ignored by the original and not by the core.
        split_batches=False,
        calculate_fid=False,
    )
    trainer.train()
    if not trainer.accelerator.is_main_process:
        return {}
    return {"averaged": digest(*trainer.ema.ema_model.state_dict().values())}


def preference_tuning(folder: Path) -> dict:
    """trl's DPO of an adapter: without it the network is its own reference."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    settings = DPOConfig(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        logging_steps=1,
        save_steps=2,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    columns = {"prompt": sentences(40), "chosen": sentences(80)[40:], "rejected": sentences(120)[80:]}
    trainer = DPOTrainer(
        language_model(),
        args=settings,
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer(),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.1),
    )
    trainer.train()
    history = comparable_logs(trainer.state.log_history)
    return {"log": [{name: entry[name] for name in entry if not name.endswith("num_tokens")} for entry in history]}


def accelerated(folder: Path) -> dict:
    from pytorch_accelerated import Trainer
    from torch.utils.data import TensorDataset

    generator = torch.Generator().manual_seed(3)
    dataset = TensorDataset(torch.randn(50, 6, generator=generator), torch.randint(3, (50,), generator=generator))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(model, torch.nn.CrossEntropyLoss(), optimizer)
    options = {"per_device_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer.train(dataset, num_epochs=2, eval_dataset=dataset, **options)
    trainer.save_checkpoint(folder / "checkpoint.pt")
    history = trainer.run_history
    metrics = {name: list(map(str, history.get_metric_values(name))) for name in sorted(history.get_metric_names())}
    return {"metrics": metrics}


# Each with the package that it needs.
PROGRAMS = {
    "diffusion": (diffusion, "denoising_diffusion_pytorch"),
    "preference_tuning": (preference_tuning, "trl"),
    "accelerated": (accelerated, "pytorch_accelerated"),
}


def main(name: str, library: str, folder: Path) -> None:
    if library == "ours":
        alias.install()
    torch.set_num_threads(1)
    program, _ = PROGRAMS[name]
    recorder = Recorder()
    with recorder.recording():
        outcome = program(folder)
    if library == "ours":
        alias.assert_original_is_idle()
    rank = os.environ.get("RANK", "0")
    import accelerate

    written = {"library": accelerate.__name__, "losses": recorder.losses, "steps": recorder.steps, "outcome": outcome}
    (folder / f"rank-{rank}.json").write_text(json.dumps(written))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
