"""Batches of an override's loader come in its order, and dicts are stacked, as by transformers."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from common.trainer import default_data_collator
from tests.bits import comparable
from tests.toys import Points, Stream
from tests.unit.trainer.both import end, make, same_on_both, train

pytestmark = pytest.mark.usefixtures("transformers")


class NoisyPoints(Points):
    """Draws a random number for each sample, and would draw another epoch's if it were told of epochs."""

    def set_epoch(self, epoch: int) -> None:
        self.x = self.x + epoch

    def __getitem__(self, index):
        return {"x": self.x[index] + torch.rand(()), "labels": self.labels[index]}


def batches_of_points(n: int) -> list[dict]:
    return list(DataLoader(Points(n), 4))


LOADERS = {
    "shuffled": lambda n: DataLoader(Points(n), 4, shuffle=True),
    "noisy": lambda n: DataLoader(NoisyPoints(n), 4, shuffle=True),
    "workers": lambda n: DataLoader(Points(n), 4, shuffle=True, num_workers=1),
    "without batches": lambda n: DataLoader(batches_of_points(n), batch_size=None, shuffle=True),
    "stream": lambda n: DataLoader(Stream(Points(n)), 4),
    "list": batches_of_points,
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_loader_of_an_override_is_trained_on_in_its_order(name, accumulation, tmp_path):
    def script(library, folder):
        class Own(library.Trainer):
            def get_train_dataloader(self):
                return LOADERS[name](22)

        limit = {"max_steps": 7} if name == "stream" else {}
        return train(library, folder, trainer_class=Own, gradient_accumulation_steps=accumulation, **limit)

    same_on_both(script, tmp_path)


@pytest.mark.parametrize("name", ["shuffled", "noisy", "list"])
def test_the_loader_of_an_override_is_evaluated_in_its_order(name, tmp_path):
    """24 samples in batches of 4: a smaller last batch has a row in DIFFERENCES.md."""

    def script(library, folder):
        class Own(library.Trainer):
            def get_eval_dataloader(self, eval_dataset=None):
                return LOADERS[name](24)

            get_test_dataloader = get_eval_dataloader

        settings = {"eval_strategy": "epoch", "per_device_eval_batch_size": 4}
        trainer = make(library, folder, trainer_class=Own, extra={"train_dataset": Points(24)}, **settings)
        trainer.train()
        metrics = comparable(trainer.evaluate())
        output = trainer.predict(Points(24))
        return metrics, output.predictions.tolist(), output.label_ids.tolist(), end(trainer)

    same_on_both(script, tmp_path)


LABELLED = {
    "numbers": {"label": 0.5},
    "arrays": {"label": np.array([1, 0])},
    "tensors": {"label": torch.tensor(3, dtype=torch.int32)},
    "tensors of numbers": {"label": torch.tensor(0.5, dtype=torch.float64)},
}


@pytest.mark.parametrize("name", LABELLED)
def test_dicts_are_stacked_alike(name, transformers):
    left_out = {"text": "a", "none": None}
    columns = {"x": torch.ones(2), "array": np.ones(3), "number": 0.5, **left_out}
    samples = [columns | LABELLED[name] for _ in range(3)]
    ours = default_data_collator(samples)
    theirs = transformers.default_data_collator(samples)
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert tensor.dtype == theirs[key].dtype
        assert torch.equal(tensor, theirs[key])
