"""Causal models are given the number of their targets, as by transformers."""

from types import SimpleNamespace

import pytest
import torch.nn.functional as F
from torch import nn

from common.trainer import default_data_collator
from common.trainer.losses import CAUSAL_LOSS_TYPES
from tests.toys import Points, seeded_net
from tests.unit.trainer.both import end, make, same_on_both

pytestmark = pytest.mark.usefixtures("transformers")


class Texts(Points):
    def __getitem__(self, index):
        labels = self.labels.roll(index)[:6].clone()
        labels[: 1 + index % 3] = index % 10
        labels[3 + index % 3 :] = -100
        return {"x": self.x[index], "labels": labels}


class LanguageModel(nn.Module):
    def __init__(self, loss_type, is_encoder_decoder) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 60)
        self.loss_type = loss_type
        self.config = SimpleNamespace(is_encoder_decoder=is_encoder_decoder)
        self.counts = []

    def forward(self, x, labels=None, shift_labels=None, **kwargs):
        logits = self.linear(x).view(-1, 6, 10)
        count = kwargs["num_items_in_batch"]
        self.counts.append((float(count), count.dtype))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": loss / count, "logits": logits}


@pytest.mark.parametrize(
    ("loss_type", "is_encoder_decoder", "gives_shifted"),
    [
        ("ForMaskedLM", False, False),
        (CAUSAL_LOSS_TYPES[0], False, False),
        (CAUSAL_LOSS_TYPES[0], True, False),
        (CAUSAL_LOSS_TYPES[0], False, True),
    ],
)
def test_a_causal_model_is_given_the_number_of_its_targets(loss_type, is_encoder_decoder, gives_shifted, tmp_path):
    def collate(samples):
        batch = default_data_collator(samples)
        if gives_shifted:
            batch["shift_labels"] = batch["labels"][:, 2:]
        return batch

    def script(library, folder):
        model = seeded_net(LanguageModel, loss_type=loss_type, is_encoder_decoder=is_encoder_decoder)
        extra = {"train_dataset": Texts(22), "eval_dataset": Texts(16), "data_collator": collate}
        settings = {"gradient_accumulation_steps": 2, "num_train_epochs": 1, "label_names": ["labels"]}
        trainer = make(library, folder, model=model, extra=extra, **settings)
        trainer.train()
        trainer.evaluate()
        return model.counts, end(trainer)

    same_on_both(script, tmp_path)


def test_the_loss_types_of_causal_models_are_those_of_transformers(transformers):
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    assert {name for name, loss in LOSS_MAPPING.items() if loss is ForCausalLMLoss} == set(CAUSAL_LOSS_TYPES)
