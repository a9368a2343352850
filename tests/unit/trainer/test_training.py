"""The training loop: the same steps as by hand, each sample with its weight, whatever shape batches have."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from common.trainer import Trainer
from tests.toys import Net, Points, Stream, loss_per_item, seeded_net
from tests.unit.trainer.toy import CountingNet, Junk, make_trainer, trained_weights, weights


class PlainDescent(Trainer):
    """Makes optimizer and schedule where transformers' documentation says that a subclass may."""

    def create_optimizer_and_scheduler(self, num_training_steps):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.lr_scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1, 0, num_training_steps)


def test_an_override_makes_optimizer_and_schedule_for_each_training(tmp_path):
    trainer = make_trainer(tmp_path, trainer_class=PlainDescent, logging_steps=1, max_steps=4)
    for _ in range(2):
        trainer.train()
        rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
        assert rates == pytest.approx([0.5, 0.375, 0.25, 0.125])


class TutorialTrainer(Trainer):
    """As well-known tutorials write it: without `num_items_in_batch`."""

    def compute_loss(self, model, inputs, return_outputs=False):
        outputs = model(inputs["x"])
        loss = F.cross_entropy(outputs["logits"], inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class KeywordTrainer(TutorialTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        assert kwargs == {"num_items_in_batch": None}
        return super().compute_loss(model, inputs, return_outputs)


def test_every_way_to_a_loss_trains_the_same(tmp_path):
    # No window with batches of different sizes: a function that divides by the labels weighs samples, a mean batches.
    settings = {"gradient_accumulation_steps": 2, "train": 32}
    expected = trained_weights(tmp_path, **settings)
    for trainer_class in (TutorialTrainer, KeywordTrainer):
        torch.testing.assert_close(trained_weights(tmp_path, trainer_class=trainer_class, **settings), expected)
    counting = CountingNet()  # nobody gives it a count
    counting.load_state_dict(seeded_net().state_dict())
    by_tutorial = trained_weights(tmp_path, model=counting, trainer_class=TutorialTrainer, **settings)
    torch.testing.assert_close(by_tutorial, expected)
    by_function = trained_weights(tmp_path, extra={"compute_loss_func": loss_per_item}, **settings)
    torch.testing.assert_close(by_function, expected, atol=1e-5, rtol=0)


class Handing(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Adapted(Handing):
    """As PEFT's models for a task, which name arguments of their own."""

    def get_base_model(self):
        return self.inner

    def forward(self, input_ids=None, labels=None, **kwargs):
        return self.inner(labels=labels, **kwargs)


WRAPPERS = {
    "own": lambda net: Handing(nn.DataParallel(net)),
    "peft": Adapted,
    "compiled": partial(torch.compile, backend="eager"),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_is_treated_as_the_model_inside(name, tmp_path):
    wrapped = WRAPPERS[name](seeded_net())
    settings = {"gradient_accumulation_steps": 2, "train": 32}
    extra = {"train_dataset": Junk(32), "eval_dataset": Junk(9)}
    trainer = make_trainer(tmp_path, model=wrapped, extra=extra, **settings)
    trainer.train()
    assert torch.equal(weights(trainer), trained_weights(tmp_path, **settings))
    assert trainer.evaluate()["eval_loss"] > 0


class Ignoring(Net):
    def forward(self, x, labels=None, **kwargs):
        return super().forward(x, labels)


def test_a_count_of_items_that_a_model_ignores_is_pointed_out(tmp_path, caplog):
    settings = {"gradient_accumulation_steps": 7, "train": 56, "max_steps": 1, "optim": "sgd", "max_grad_norm": 0}

    def train(model):
        trainer = make_trainer(tmp_path, model=seeded_net(model), **settings)
        trainer.train()
        return trainer.state.log_history[-1]["train_loss"]

    class Right(Ignoring):
        accepts_loss_kwargs = False

    right = train(Right)
    assert train(CountingNet) == pytest.approx(right)
    assert "num_items_in_batch" not in caplog.text
    assert train(Ignoring) == pytest.approx(7 * right)
    assert "its loss is 7 times too large" in caplog.text


def test_a_count_that_an_override_passes_to_a_model_without_keywords_changes_no_loss(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    batch = {"x": Points(8).x, "labels": Points(8).labels}
    expected = trainer.compute_loss(trainer.model, batch)
    assert trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(8.0)) == expected


@pytest.mark.parametrize(("compiled", "accumulation"), [("module", 2), ("in place", 2), ("function in it", 1)])
def test_a_compiled_model_that_is_given_the_count_is_compiled_once(compiled, accumulation, tmp_path):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = Ignoring()
    if compiled == "module":
        model = torch.compile(model, backend=backend)
    elif compiled == "in place":
        model.compile(backend=backend)
    else:
        model.forward = torch.compile(model.forward, backend=backend)
    make_trainer(tmp_path, model=model, train=32, gradient_accumulation_steps=accumulation).train()
    assert len(graphs) == 1


def test_outputs_may_be_dicts_tuples_objects_or_the_loss(tmp_path):
    @dataclass
    class Output:
        loss: torch.Tensor
        logits: torch.Tensor

    shapes = {
        "dict": dict,
        "tuple": lambda **named: (named["loss"], named["logits"]),
        "object": Output,
        "bare loss": lambda loss, logits: loss,
    }
    expected = trained_weights(tmp_path)
    for name, shape in shapes.items():

        class Shaped(Net):
            def forward(self, x, labels, shape=shape):
                return shape(**super().forward(x, labels))

        trainer = make_trainer(tmp_path, model=seeded_net(Shaped), evaluate=11)
        trainer.train()
        assert torch.equal(weights(trainer), expected), name
        assert trainer.evaluate()["eval_loss"] > 0
        if name != "bare loss":
            assert trainer.predict(Points(11)).predictions.shape == (11, 10), name


def test_tuples_and_tensors_are_batches_too(tmp_path):
    points = Points(40)
    pairs = TensorDataset(points.x, points.labels)
    assert torch.equal(trained_weights(tmp_path, extra={"train_dataset": pairs}), trained_weights(tmp_path))

    def loss_function(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs, labels, reduction="sum") / num_items_in_batch

    bare = seeded_net().linear
    trainer = make_trainer(tmp_path, model=bare, extra={"train_dataset": pairs, "compute_loss_func": loss_function})
    trainer.train()
    torch.testing.assert_close(weights(trainer), trained_weights(tmp_path), atol=1e-5, rtol=0)
    assert trainer.predict(pairs).label_ids.shape == (40,)


def test_a_stream_needs_a_number_of_steps(tmp_path):
    with pytest.raises(ValueError, match="max_steps"):
        make_trainer(tmp_path, extra={"train_dataset": Stream(Points(40))}).train()


def test_a_stream_that_is_too_short_for_a_step_ends_the_training(tmp_path, caplog):
    """The original begins one epoch after the other, for ever, because none of them has a step."""
    settings = {"max_steps": 7, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 10}
    for length, steps in ((0, 0), (20, 0), (30, 7)):
        trainer = make_trainer(tmp_path, extra={"train_dataset": Stream(Points(length))}, **settings)
        assert trainer.train().global_step == steps
    for batches in (0, 2):
        said = f"epoch 0 has {batches} batches, too few for a step: training stops after 0 of 7 steps"
        assert caplog.text.count(said) == 1


def test_columns_that_nothing_takes_are_an_error(tmp_path):
    class Alien(Points):
        def __getitem__(self, index):
            return {"y": self.x[index]}

    with pytest.raises(ValueError, match="no column in common"):
        make_trainer(tmp_path, extra={"train_dataset": Alien(8)}).train()


def test_several_gpus_in_one_process_are_pointed_out_and_not_used(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    trainer = make_trainer(tmp_path)
    trainer.train()
    assert "processes with one device each: 1, GPUs visible: 2" in capsys.readouterr().out
    assert not isinstance(trainer.model_wrapped, nn.DataParallel)


def test_fp16_logs_the_norm_of_the_true_gradients(tmp_path):
    for clip in (0, 1e6):
        for optim in ("adamw_torch", "adamw_torch_fused"):
            trainer = make_trainer(tmp_path, train=8, fp16=True, logging_steps=1, max_grad_norm=clip, optim=optim)
            trainer.train()
            plain = make_trainer(tmp_path, train=8, logging_steps=1)
            plain.train()
            norms = [t.state.log_history[0]["grad_norm"] for t in (trainer, plain)]
            assert norms[0] == pytest.approx(norms[1], rel=1e-2), (clip, optim)


class OverflowsOnce(Trainer):
    """Has gradients that are not finite in its second step."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss * float("inf") if self.state.global_step == 1 else loss


def test_the_schedule_waits_where_fp16_skips_a_step(tmp_path):
    trainer = make_trainer(tmp_path, trainer_class=OverflowsOnce, fp16=True, logging_steps=1, max_steps=4)
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates == pytest.approx([0.05, 0.0375, 0.0375, 0.025])
    assert trainer.lr_scheduler.last_epoch == 3


def test_a_model_may_have_several_labels(tmp_path):
    class TwoLabels(Points):
        def __getitem__(self, index):
            return {"x": self.x[index], "start_labels": self.labels[index], "end_labels": self.labels[index]}

    class Spans(Net):
        def forward(self, x, start_labels=None, end_labels=None):
            return super().forward(x, start_labels)

    trainer = make_trainer(tmp_path, model=seeded_net(Spans), extra={"train_dataset": TwoLabels(40)})
    assert trainer.label_names == ["start_labels", "end_labels"]
    trainer.train()
    torch.testing.assert_close(weights(trainer), trained_weights(tmp_path))
    start, end = trainer.predict(TwoLabels(8)).label_ids
    assert start.shape == end.shape == (8,)
