"""Evaluation: each sample counts once, with its weight, and the predictions come in order."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from common.eval_sampler import DistributedEvalSampler
from common.processes import ranks
from common.trainer import Trainer, TrainerState
from tests.bits import digest
from tests.states import on_a_rank, reset_states
from tests.toys import Net, Points, Stream, loss_per_item, seeded_net
from tests.unit.trainer.both import make, on_both
from tests.unit.trainer.toy import CountingNet, accuracy, make_trainer

N = 101


def plain_loader(trainer: Trainer, points: Points, batch: int) -> DataLoader:
    return DataLoader(points, batch_size=batch)


def prepared_loader(trainer: Trainer, points: Points, batch: int) -> DataLoader:
    return trainer.accelerator.prepare(DataLoader(points, batch_size=batch // 2 + 3))


def loader_of_a_share(trainer: Trainer, points: Points, batch: int) -> DataLoader:
    return DataLoader(points, 1, sampler=DistributedEvalSampler(points))


class Source(NamedTuple):
    """The origin of an evaluation's batches; `loader` makes what an override of `get_eval_dataloader` returns."""

    is_stream: bool = False
    accelerator_config: dict | None = None
    loader: Callable[[Trainer, Points, int], DataLoader] | None = None


SAMPLES = Source()
STREAM = Source(is_stream=True)
STREAM_ON_EVERY_RANK = Source(is_stream=True, accelerator_config={"dispatch_batches": False})
SPLIT_BATCHES = Source(accelerator_config={"split_batches": True, "dispatch_batches": True})
PLAIN_LOADER = Source(loader=plain_loader)
PREPARED_LOADER = Source(loader=prepared_loader)
LOADER_OF_A_SHARE = Source(loader=loader_of_a_share)


class Case(NamedTuple):
    """An evaluation; `loss` is of the "model", a "function" or a "counting model": the last two divide by the items."""

    batch: int
    source: Source = SAMPLES
    n: int = N
    loss: str = "model"


class Outcome(NamedTuple):
    """The results of an evaluation and of a prediction.

    Attributes:
        largest_deviation: of a prediction from the network's own output.
        reference, reference_accuracy: the true loss and accuracy.
    """

    loss: float
    accuracy: float
    has_all_labels: bool
    largest_deviation: float
    reference: float
    reference_accuracy: float


def unlike_points(n: int) -> Points:
    points = Points(n, torch.float64)
    points.x *= torch.linspace(0, 10, n, dtype=torch.float64)[:, None]
    return points


def outcome(folder, case: Case) -> Outcome:
    points = unlike_points(case.n)
    source = case.source
    dataset = Stream(points) if source.is_stream else points
    net = seeded_net(CountingNet if case.loss == "counting model" else Net, dtype=torch.float64)
    extra = {"compute_metrics": accuracy, "eval_dataset": dataset}
    if case.loss == "function":
        extra["compute_loss_func"] = loss_per_item
    settings = {"per_device_eval_batch_size": case.batch, "accelerator_config": source.accelerator_config}
    trainer = make_trainer(folder, model=net, extra=extra, **settings)
    if source.loader is not None:
        trainer.get_eval_dataloader = lambda dataset=None: source.loader(trainer, points, case.batch)
    metrics = trainer.evaluate()
    prediction = trainer.predict(dataset)
    expected = net(points.x)["logits"].detach()
    return Outcome(
        loss=metrics["eval_loss"],
        accuracy=metrics["eval_accuracy"],
        has_all_labels=torch.equal(torch.from_numpy(prediction.label_ids), points.labels),
        largest_deviation=np.abs(prediction.predictions - expected.numpy()).max(),
        reference=F.cross_entropy(expected, points.labels).item(),
        reference_accuracy=(expected.argmax(1) == points.labels).double().mean().item(),
    )


@on_a_rank
def outcomes_on_rank(folder, cases: list[Case]) -> list[Outcome]:
    outcomes = []
    for case in cases:
        outcomes.append(outcome(folder, case))
        reset_states()
    return outcomes


ANY_BATCHES = [SAMPLES, STREAM, STREAM_ON_EVERY_RANK, PLAIN_LOADER, PREPARED_LOADER, LOADER_OF_A_SHARE]
LOSSES = ["model", "function", "counting model"]


@pytest.mark.parametrize("processes", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_evaluation_does_not_depend_on_the_number_of_processes(processes, tmp_path):
    cases = [Case(64, source, loss=loss) for source in ANY_BATCHES for loss in LOSSES]
    cases += [Case(batch, source) for source in ANY_BATCHES for batch in (1, 7)]
    cases += [Case(6, SPLIT_BATCHES, n) for n in (12, 13, 17)]
    # Fewer samples than processes, and than the batches of all of them.
    cases += [Case(2, n=n) for n in (1, 2, 4, 7)]
    for outcomes in ranks(processes).run(outcomes_on_rank, tmp_path, cases):
        for got, case in zip(outcomes, cases, strict=True):
            assert got.loss == pytest.approx(got.reference, rel=1e-13), case
            assert got.accuracy == pytest.approx(got.reference_accuracy, rel=1e-14), case
            assert got.has_all_labels and got.largest_deviation < 1e-12


def test_without_labels_there_are_predictions_but_no_loss(tmp_path):
    class Unlabelled(Points):
        def __getitem__(self, index):
            return {"x": self.x[index]}

    output = make_trainer(tmp_path).predict(Unlabelled(5))
    assert output.predictions.shape == (5, 10) and output.label_ids is None
    assert "test_loss" not in output.metrics


@pytest.mark.parametrize("shape", [lambda loss: {"loss": loss}, lambda loss: (loss,), lambda loss: loss])
def test_metrics_are_computed_for_a_model_that_returns_its_loss_only(shape, tmp_path):
    class LossOnly(Net):
        def forward(self, x, labels=None):
            return shape(super().forward(x, labels)["loss"])

    given = []

    def count_labels(prediction):
        predictions, labels = prediction
        given.append((predictions, len(labels)))
        return {"labels": len(labels)}

    trainer = make_trainer(tmp_path, model=LossOnly(), extra={"compute_metrics": count_labels})
    assert trainer.evaluate(Points(11))["eval_labels"] == 11
    assert trainer.predict(Points(3)).predictions == ()
    assert given == [((), 11), ((), 3)]


def test_metrics_may_be_arrays_vectors_and_nested(tmp_path):
    given = {"per_class": np.arange(3.0), "vector": torch.arange(2), "one": torch.ones(1)}
    given["nested"] = {"inner": np.float32(0.5), "list": [np.int64(1), 2]}
    extra = {"compute_metrics": lambda prediction: dict(given)}
    saving = {"eval_strategy": "epoch", "save_strategy": "epoch"}
    trainer = make_trainer(tmp_path, evaluate=8, extra=extra, **saving)
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_per_class"].tolist() == [0.0, 1.0, 2.0] and metrics["eval_vector"].tolist() == [0, 1]
    assert metrics["eval_one"] == 1.0 and metrics["eval_nested"] == {"inner": 0.5, "list": [1, 2]}
    state = TrainerState.load_from_json(str(tmp_path / "checkpoint-5" / "trainer_state.json"))
    (entry,) = [entry for entry in state.log_history if "eval_loss" in entry]
    assert entry["eval_per_class"] == [0.0, 1.0, 2.0] and entry["eval_vector"] == [0, 1]


def test_one_of_several_sets_is_evaluated_by_its_key(tmp_path):
    trainer = make_trainer(tmp_path, extra={"eval_dataset": {"small": Points(4), "large": Points(12)}})
    assert trainer.evaluate("large")["eval_loss"] == trainer.evaluate(Points(12))["eval_loss"]
    trainer.get_eval_dataloader = mock.Mock(wraps=trainer.get_eval_dataloader)
    assert {"eval_small_loss", "eval_large_loss"} <= trainer.evaluate().keys()
    assert trainer.get_eval_dataloader.call_args_list == [mock.call("small"), mock.call("large")]


def test_a_plain_loader_is_evaluated_whole_after_a_training_with_a_short_last_batch(tmp_path):
    """The original cuts each batch of such a loader to the 3 samples that the last training batch has."""
    counts = []

    def count(prediction):
        counts.append(len(prediction.predictions))
        return {}

    settings = {"train": 43, "evaluate": 24, "eval_strategy": "epoch", "per_device_train_batch_size": 8}
    trainer = make_trainer(tmp_path, extra={"compute_metrics": count}, **settings)
    trainer.get_eval_dataloader = lambda dataset=None: DataLoader(Points(24), batch_size=8)
    trainer.train()
    trainer.evaluate()
    assert counts == [24, 24]


class Certain(nn.Module):
    """Is certain of the token that it is given, and pays attention to all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, tokens, labels=None):
        logits = F.one_hot(tokens, 4)
        attention = torch.ones(1, 2, tokens.shape[1], tokens.shape[1])
        bytes_ = tokens.to(torch.uint8)
        return {"loss": self.linear(torch.ones(1, 1)).sum(), "logits": logits.float(), "a": (attention,), "b": bytes_}


class Sentences(Points):
    def __getitem__(self, index):
        tokens = torch.full((index + 1,), 3)
        return {"tokens": tokens, "labels": tokens}


def test_rows_of_different_lengths_are_filled_up(tmp_path):
    output = make_trainer(tmp_path, model=Certain(), per_device_eval_batch_size=1).predict(Sentences(3))
    logits, [attention], bytes_ = output.predictions
    assert logits.shape == (3, 3, 4)
    assert output.label_ids.tolist() == [[3, -100, -100], [3, 3, -100], [3, 3, 3]]
    assert attention[0, 0].tolist() == [[1, -100, -100], [-100] * 3, [-100] * 3]
    # The bits of -100, as in the original.
    assert bytes_.tolist() == [[3, 156, 156], [3, 3, 156], [3, 3, 3]] and bytes_.dtype == np.uint8


class Boxes(Points):
    def __getitem__(self, index):
        boxes = torch.full((index % 3, 4), float(index))
        return {"x": self.x[index], "labels": {"boxes": boxes, "number": index}}


class Detector(nn.Module):
    """Finds the boxes of the labels, as a list of dicts or, for numbers, of tensors. The loss is their mean number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x, labels):
        assert len(x) == len(labels)
        numbers = torch.tensor([float(label["number"]) for label in labels])
        found = [{"boxes": label["boxes"]} for label in labels]
        return {
            "loss": numbers.mean(),
            "dicts": found,
            "tensors": [each["boxes"] for each in found],
            "sum": torch.tensor(1.0),
        }


class DetectingTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(*inputs)
        return (outputs["loss"], outputs["dicts"]) if return_outputs else outputs["loss"]


def collate_lists(samples):
    return {"x": torch.stack([each["x"] for each in samples]), "labels": [each["labels"] for each in samples]}


def collate_tuples(samples):
    return tuple(each["x"] for each in samples), tuple(each["labels"] for each in samples)


@on_a_rank
def detect(folder, batch: int, n: int) -> None:
    settings = {"per_device_eval_batch_size": batch, "remove_unused_columns": False}
    for trainer_class, collate in ((Trainer, collate_lists), (DetectingTrainer, collate_tuples)):
        extra = {"data_collator": collate}
        trainer = make_trainer(folder, model=Detector(), trainer_class=trainer_class, extra=extra, **settings)
        output = trainer.predict(Boxes(n))
        assert output.metrics["test_loss"] == pytest.approx((n - 1) / 2)
        assert [label["number"] for label in output.label_ids] == [*range(n)]
        found = output.predictions
        if trainer_class is Trainer:
            found = found[0]
            assert [len(boxes) for boxes in output.predictions[1]] == [i % 3 for i in range(n)]
        for i, each in enumerate(found):
            assert each["boxes"].tolist() == [[i] * 4] * (i % 3)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_boxes_arrive_as_one_entry_an_image(processes, tmp_path):
    for batch, n in ((4, 9), (3, 2), (1, 4), (2, 8)):
        ranks(processes).run(detect, tmp_path, batch, n)


def test_an_output_of_which_no_predictions_can_be_made_is_named_at_the_first_batch(tmp_path):
    class Caching(Net):
        def forward(self, x, labels=None):
            return super().forward(x, labels) | {"hidden": x, "nothing": None, "cache": [object()]}

    trainer = make_trainer(tmp_path, model=Caching())
    batches = []
    trainer.model.register_forward_hook(lambda *args: batches.append(args))
    with pytest.raises(TypeError, match="hold a object: name its key in ignore_keys"):
        trainer.predict(Points(40))
    assert len(batches) == 1
    output = trainer.predict(Points(5), ignore_keys=["cache"])
    assert [part.shape for part in output.predictions] == [(5, 10), (5, 16)]
    assert trainer.predict(Points(5), ignore_keys=["cache", "hidden"]).predictions.shape == (5, 10)


class Sums(nn.Module):
    """Returns, besides the logits, a number for each class: no row of it belongs to a sample."""

    def __init__(self, **numbers) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 10)
        self.numbers = numbers

    def forward(self, x, labels=None):
        logits = self.linear(x)
        outputs = {"loss": F.cross_entropy(logits, labels), "logits": logits, "sums": logits.sum(0)}
        return outputs | self.numbers


def test_a_number_among_the_outputs_does_not_change_how_the_others_are_cut(tmp_path, transformers):
    def script(library, folder, **numbers):
        trainer = make(library, folder, model=seeded_net(Sums, **numbers), per_device_eval_batch_size=4)
        return digest(torch.from_numpy(trainer.predict(Points(6)).predictions[1]))

    ours, theirs = on_both(script, tmp_path)
    assert ours == theirs
    ours_with_number, theirs_with_number = on_both(partial(script, number=torch.tensor(1.0)), tmp_path)
    assert ours_with_number == ours
    assert theirs_with_number != theirs


def test_with_persistent_workers_each_evaluation_reads_its_own_set(tmp_path, transformers):
    """The original keeps the loader of the first one."""

    def script(library, folder):
        trainer = make(library, folder, dataloader_num_workers=1, dataloader_persistent_workers=True)
        return [trainer.evaluate(Points(n))["eval_loss"] for n in (16, 5)]

    ours, theirs = on_both(script, tmp_path)
    assert theirs == [ours[0], ours[0]] and ours[0] != ours[1]
