"""Models and tokenizers of transformers: what a published script does with them, on both libraries."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.processes import ranks
from common.trainer.batches import find_labels
from tests.bits import comparable, with_digests
from tests.states import on_a_rank
from tests.toys import Net
from tests.unit.trainer.both import same_on_both
from tests.unit.trainer.toy import make_trainer, weights

WORDS = 40


def make_tokenizer(transformers):
    tokenizers = pytest.importorskip("tokenizers")
    names = ["[UNK]", "[PAD]", "[END]", *(f"w{number}" for number in range(WORDS))]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", eos_token="[END]"
    )


def classify(library, folder, capsys):
    """A classifier that finds a text's end by the padding token, which it knows from its tokenizer alone."""
    import transformers

    tokenizer = make_tokenizer(transformers)
    draw = random.Random(0)
    texts = [" ".join(f"w{draw.randrange(WORDS)}" for _ in range(draw.randint(2, 9))) for _ in range(20)]
    samples = [dict(tokenizer(text), label=number % 3, unused=0) for number, text in enumerate(texts)]
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": len(tokenizer)}
    transformers.set_seed(0)
    model = transformers.GPT2ForSequenceClassification(transformers.GPT2Config(num_labels=3, **sizes))
    seen = []

    class Watch(library.TrainerCallback):
        def on_train_begin(self, args, state, control, processing_class, **kwargs):
            seen.append(processing_class is tokenizer)

    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
    args = library.TrainingArguments(folder, max_steps=4, save_steps=2, gradient_checkpointing=True, **quiet)
    with args.main_process_first(desc="tokenization"):
        trainer = library.Trainer(
            model,
            args,
            train_dataset=samples,
            eval_dataset=samples[:7],
            processing_class=tokenizer,
            callbacks=[Watch],
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1) + 10 * labels,
            compute_metrics=lambda prediction: {"sum": float(prediction.predictions.sum())},
        )
    metrics = trainer.train().metrics
    trainer.save_model()
    trainer.save_state()
    capsys.readouterr()
    results = {"train": {"train_loss": metrics["train_loss"], "train_runtime": 3661.257}, "eval": trainer.evaluate()}
    for split, values in results.items():
        trainer.save_metrics(split, values)
    trainer.log_metrics("train", results["train"])
    trainer.create_model_card(tags=["a tag"])
    saved = []
    for path in (Path(folder), Path(folder, "checkpoint-2")):
        again = type(model).from_pretrained(path)
        saved.append({"weights": with_digests(dict(again.state_dict())), "config": (path / "config.json").read_text()})
        assert transformers.AutoTokenizer.from_pretrained(path).get_vocab() == tokenizer.get_vocab()
    written = {path.name: comparable(json.loads(path.read_text())) for path in Path(folder).glob("*_results.json")}
    printed = re.search(r"\*\*\*\*\* train metrics.*", capsys.readouterr().out, re.DOTALL).group()
    assert "a tag" in Path(folder, "README.md").read_text()
    return {"callback has the tokenizer": seen, "saved": saved, "results": written, "printed": printed}


def test_a_published_script_ends_the_same(tmp_path, transformers, capsys):
    assert "train_runtime = 1:01:01.25" in same_on_both(classify, tmp_path, capsys)["printed"]


@pytest.mark.parametrize("task", ["QuestionAnswering", "SequenceClassification"])
def test_labels_are_found_as_in_transformers(task, transformers):
    model_class = getattr(transformers, f"BertFor{task}")
    with torch.device("meta"):
        model = model_class(transformers.BertConfig(num_hidden_layers=1))
    assert find_labels(model) == transformers.utils.generic.find_labels(model_class)


class Recomputed(Net):
    """A network as those of transformers: it computes activations again, in the reentrant way, and says so."""

    is_activation_checkpointing = True

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)

    def forward(self, x, labels=None):
        return super().forward(checkpoint(self.first, x.requires_grad_(), use_reentrant=True), labels)


@on_a_rank
def train_recomputed(folder, batch_size):
    torch.manual_seed(5)
    trainer = make_trainer(folder, model=Recomputed(), per_device_train_batch_size=batch_size, optim="sgd")
    trainer.train()
    return weights(trainer)


def test_activations_that_are_computed_again_may_be_averaged_over_ranks(tmp_path):
    (expected,) = ranks(1).run(train_recomputed, tmp_path / "one", 8)
    for got in ranks(2).run(train_recomputed, tmp_path / "two", 4):
        torch.testing.assert_close(got, expected)


class Repeating(Net):
    def forward(self, x):
        return {"logits": x}


@on_a_rank
def predict_lengths(folder):
    """The number of positions that each row had when its logits were preprocessed."""

    def lengths(logits, labels):
        return torch.full(logits.shape[:1], logits.shape[1])

    extra = {"preprocess_logits_for_metrics": lengths, "data_collator": lambda samples: samples[0]}
    trainer = make_trainer(folder, model=Repeating(), per_device_eval_batch_size=1, extra=extra)
    rows = [{"x": torch.zeros(1, length)} for length in (2, 5, 3, 4)]
    return trainer.predict(rows).predictions.tolist()


def test_logits_are_preprocessed_as_on_one_process(tmp_path):
    """In the original a row has been filled up to the longest of the other ranks."""
    for processes in (1, 2):
        assert ranks(processes).run(predict_lengths, tmp_path) == [[2, 5, 3, 4]] * processes
