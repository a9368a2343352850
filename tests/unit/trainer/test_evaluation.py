"""Evaluation: each sample once, with its weight, in order, in time and memory proportional to their number."""

import tracemalloc

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from common.trainer import Trainer, evaluation
from common.trainer.evaluation import _join
from tests.unit.trainer.toy import Net, Points, accuracy, make_trainer, seeded_net
from tests.workers import ranks

N = 101


class Stream(IterableDataset):
    def __init__(self, points: Points) -> None:
        self.points = points

    def __iter__(self):
        return (self.points[i] for i in range(len(self.points)))


def outcome(folder, batch: int, dtype=torch.float64, kind: str = "map", n: int = N):
    """Loss, accuracy and predictions for n samples; samples are unlike, so that their number and weight show."""
    points = Points(n, dtype)
    points.x *= torch.linspace(0, 10, n, dtype=dtype)[:, None]
    dataset = Stream(points) if kind == "stream" else points
    extra = {"compute_metrics": accuracy, "eval_dataset": dataset}
    model = seeded_net(dtype=dtype)
    trainer = make_trainer(folder, model=model, per_device_eval_batch_size=batch, extra=extra)
    if kind == "plain":
        trainer.get_eval_dataloader = lambda dataset=None: DataLoader(points, batch_size=batch)
    metrics = trainer.evaluate()
    prediction = trainer.predict(dataset)
    same = torch.equal(torch.from_numpy(prediction.label_ids), points.labels)
    expected = model(points.x)["logits"].detach()
    error = np.abs(prediction.predictions - expected.numpy()).max()
    reference = F.cross_entropy(expected.double(), points.labels).item()
    return metrics["eval_loss"], metrics["eval_accuracy"], same, error, reference


def end_group():
    from common.accelerator import PartialState

    PartialState().destroy_process_group()
    PartialState._reset_state()


def outcome_on_rank(*args):
    torch.set_num_threads(1)
    try:
        return outcome(*args)
    finally:
        end_group()


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_the_loss_does_not_depend_on_the_batch_size(batch, tmp_path):
    for kind in ("map", "stream", "plain"):
        loss, accurate, same, error, reference = outcome(tmp_path, batch, torch.float64, kind)
        assert loss == pytest.approx(reference, rel=1e-14)
        assert accurate == outcome(tmp_path, N)[1]
        assert same and error < 1e-12


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_the_loss_does_not_depend_on_the_number_of_processes(batch, tmp_path):
    alone = outcome(tmp_path, batch)
    for kind in ("map", "stream", "plain"):
        for loss, accurate, same, error, reference in ranks(3).run(
            outcome_on_rank, tmp_path, batch, torch.float64, kind
        ):
            assert loss == pytest.approx(alone[0], rel=1e-14) and loss == pytest.approx(reference, rel=1e-14)
            assert accurate == alone[1]
            assert same and error < 1e-12


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_fewer_samples_than_processes_lose_nothing(n, tmp_path):
    alone = outcome(tmp_path, 2, torch.float64, "map", n)
    for loss, _, same, error, _ in ranks(3).run(outcome_on_rank, tmp_path, 2, torch.float64, "map", n):
        assert loss == pytest.approx(alone[0], rel=1e-14)
        assert same and error < 1e-12


def test_a_mean_of_means_would_have_been_noticed(tmp_path):
    points = Points(N, torch.float64)
    points.x *= torch.linspace(0, 10, N, dtype=torch.float64)[:, None]
    model = seeded_net(dtype=torch.float64)
    means = [model(x, y)["loss"].item() for x, y in zip(points.x.split(64), points.labels.split(64), strict=True)]
    assert abs(np.mean(means) - outcome(tmp_path, 64)[0]) > 1e-3


def test_metrics_and_their_names(tmp_path):
    trainer = make_trainer(tmp_path, evaluate=11, extra={"compute_metrics": accuracy})
    timings = {"_runtime", "_samples_per_second", "_steps_per_second"}
    assert trainer.evaluate().keys() == {"eval_loss", "eval_accuracy", "epoch"} | {f"eval{t}" for t in timings}
    assert trainer.state.log_history[-1].keys() >= {"eval_loss", "step", "epoch"}
    output = trainer.predict(Points(5))
    assert output.metrics.keys() == {"test_loss", "test_accuracy"} | {f"test{t}" for t in timings}
    assert isinstance(output.metrics["test_accuracy"], float)
    several = trainer.evaluate({"a": Points(3), "b": Points(4)})
    assert {"eval_a_loss", "eval_b_accuracy"} <= several.keys()


def test_without_labels_there_are_predictions_but_no_loss(tmp_path):
    class Unlabelled(Points):
        def __getitem__(self, index):
            return {"x": self.x[index]}

    output = make_trainer(tmp_path).predict(Unlabelled(5))
    assert output.predictions.shape == (5, 10) and output.label_ids is None
    assert "test_loss" not in output.metrics


def test_logits_can_be_reduced_before_they_are_kept(tmp_path):
    seen = []

    def keep_the_winner(logits, labels):
        seen.append((logits.shape, labels.shape))
        return logits.argmax(-1)

    trainer = make_trainer(tmp_path, extra={"preprocess_logits_for_metrics": keep_the_winner})
    assert trainer.predict(Points(11)).predictions.shape == (11,)
    assert seen == [((8, 10), (8,)), ((3, 10), (3,))]


def test_ignored_keys_and_several_outputs(tmp_path):
    class Several(Net):
        def forward(self, x, labels=None):
            return super().forward(x, labels) | {"hidden": x, "nothing": None}

    trainer = make_trainer(tmp_path, model=Several())
    assert [part.shape for part in trainer.predict(Points(5)).predictions] == [(5, 10), (5, 16)]
    assert trainer.predict(Points(5), ignore_keys=["hidden"]).predictions.shape == (5, 10)


def test_half_precision_outputs_become_arrays():
    assert _join([torch.ones(2, dtype=torch.bfloat16)] * 2).dtype == np.float32
    nested = _join([{"a": (torch.ones(2, 3), None)}] * 2)
    assert nested["a"][0].shape == (4, 3) and nested["a"][1] is None


def test_evaluating_leaves_training_mode_as_it_was(tmp_path):
    trainer = make_trainer(tmp_path, model=seeded_net(dropout=0.5), evaluate=11)
    first = trainer.evaluate()["eval_loss"]
    trainer.model.train()
    assert trainer.evaluate()["eval_loss"] == first  # without dropout
    assert trainer.model.training


def test_predictions_leave_the_device_as_they_come(tmp_path, monkeypatch):
    """A graph that hung on a prediction, or one that stayed where it was, would keep its batch alive."""
    alive = []

    class Watched(Trainer):
        def prediction_step(self, *args, **kwargs):
            loss, logits, labels = super().prediction_step(*args, **kwargs)
            assert not logits.requires_grad and not loss.requires_grad
            alive.append(logits)
            return loss, logits, labels

    moved, send = [], evaluation.send_to_device
    monkeypatch.setattr(evaluation, "send_to_device", lambda data, to: (moved.append(to), send(data, to))[1])
    make_trainer(tmp_path, trainer_class=Watched).predict(Points(40))
    assert moved == ["cpu"] * 5 == ["cpu"] * len(alive)


def test_memory_grows_with_the_number_of_samples_and_no_faster():
    def peak(n: int) -> int:
        parts = [torch.zeros(4, 50) for _ in range(n)]
        tracemalloc.start()
        _join(parts)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(4000) < 6 * peak(1000)


class Normalised(nn.Module):
    """With buffers, which DDP's forward would synchronise."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net = nn.BatchNorm1d(16), seeded_net()

    def forward(self, x, labels=None):
        return self.net(self.norm(x), labels)


def train_with_buffers(folder):
    torch.set_num_threads(1)
    try:
        trainer = make_trainer(folder, model=Normalised(), train=24, evaluate=9, eval_strategy="epoch")
        trainer.train()
        return trainer.state.log_history[0]["eval_loss"]
    finally:
        end_group()


def test_uneven_ranks_do_not_wait_for_each_other_in_the_model(tmp_path):
    losses = ranks(2).run(train_with_buffers, tmp_path)
    assert losses[0] == losses[1]
