"""Models, tokenizers and the argument parser of transformers, which its scripts bring along."""

import pytest
import torch

import common.trainer
from common.trainer import Trainer, TrainingArguments

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.logging.set_verbosity_error()


SENTENCES = ["a b c", "b", "c a", "a a b c", "c", "b b"]


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "a": 2, "b": 3, "c": 4}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


def classifier():
    torch.manual_seed(3)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=5, num_labels=2, max_position_embeddings=8, **sizes)
    return transformers.BertForSequenceClassification(config)


def trained(library, folder):
    """A Trainer of either library that is given a tokenizer, and samples of unequal lengths."""
    words = tokenizer()
    samples = [dict(words(text)) | {"label": len(text) % 2} for text in SENTENCES]
    settings = {"per_device_train_batch_size": 2, "num_train_epochs": 2, "logging_steps": 1, "save_strategy": "epoch"}
    args = library.TrainingArguments(str(folder), use_cpu=True, report_to="none", disable_tqdm=True, **settings)
    trainer = library.Trainer(classifier(), args, train_dataset=samples, processing_class=words)
    trainer.train()
    return trainer


def test_a_tokenizer_pads_the_samples_as_in_transformers(tmp_path):
    libraries = (common.trainer, transformers)
    ends = [trained(library, tmp_path / library.__name__).model.state_dict() for library in libraries]
    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name]), name


@pytest.mark.parametrize("where", ["saved", "checkpoint-6"])
def test_a_saved_model_is_loaded_by_from_pretrained(where, tmp_path):
    trainer = trained(common.trainer, tmp_path)
    trainer.save_model(str(tmp_path / "saved"))
    # The second training goes on after the files beside the weights have been verified.
    assert trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3")).global_step == 6
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / where)
    assert type(loaded) is type(trainer.model) and loaded.config.architectures == ["BertForSequenceClassification"]
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, trainer.model.state_dict()[name]), name
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / where)
    assert words("a c")["input_ids"] == [2, 4]


COMMAND_LINE = """
--output_dir out --learning_rate 0.25 --lr_scheduler_kwargs {"power":2.0} --accelerator_config {"split_batches":true}
--label_names labels answers --do_train --no_remove_unused_columns --resume_from_checkpoint out/checkpoint-3
--report_to none
"""


def test_arguments_may_come_from_a_command_line():
    """The same line, read for both libraries."""
    parsed = []
    for arguments_class in (TrainingArguments, transformers.TrainingArguments):
        (args,) = transformers.HfArgumentParser(arguments_class).parse_args_into_dataclasses(COMMAND_LINE.split())
        parsed.append(args)
    ours, theirs = parsed
    for name in ("output_dir", "learning_rate", "lr_scheduler_kwargs", "label_names", "do_train", "report_to"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.remove_unused_columns is theirs.remove_unused_columns is False
    assert ours.resume_from_checkpoint == theirs.resume_from_checkpoint == "out/checkpoint-3"
    assert ours.loading.split_batches is theirs.accelerator_config.split_batches is True


def test_a_model_of_ones_own_needs_no_from_pretrained(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True)
    Trainer(torch.nn.Linear(2, 3), args).save_model()
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
