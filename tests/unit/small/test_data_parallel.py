"""The emulated DataParallel computes what the bare module computes, and runs repeat."""

import pytest
import torch
from torch import nn

from common.model import BasicNet
from common.processes import ranks
from common.small.data_parallel import EmulatedDataParallel, replica_devices, seed_replicas
from common.weights import max_weight_difference
from tests.levels import SHORT, run_level


def _pair(replicas: int):
    torch.manual_seed(0)
    bare = BasicNet(dropout=False).double()
    same = BasicNet(dropout=False).double()
    same.load_state_dict(bare.state_dict())
    return bare, EmulatedDataParallel(same, replicas)


@pytest.mark.parametrize("replicas, batch", [(1, 3), (2, 1), (2, 10), (3, 10), (4, 3), (4, 10)])
def test_outputs_and_gradients_equal_the_bare_modules(replicas, batch):
    bare, parallel = _pair(replicas)
    images = torch.randn(batch, 1, 28, 28, dtype=torch.float64)
    expected, outputs = bare(images), parallel(images)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-12)
    assert all(p.grad is None for p in parallel.parameters())
    (expected**2).mean().backward()
    (outputs**2).mean().backward()
    for (name, ours), theirs in zip(parallel.module.named_parameters(), bare.parameters(), strict=True):
        assert ours.grad.abs().max() > 0
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12, msg=name)


def test_the_threads_compute_in_the_callers_precision():
    with torch.autocast("cpu", torch.bfloat16):
        assert EmulatedDataParallel(nn.Linear(3, 2), 2)(torch.ones(4, 3)).dtype == torch.bfloat16


class _Answers(nn.Bilinear):
    def forward(self, first, *, second):
        product = super().forward(first, second)
        return {"product": product, "mean": product.mean()}


def test_inputs_and_outputs_may_be_structures():
    torch.manual_seed(0)
    bare = _Answers(3, 4, 5)
    first, second = torch.randn(9, 3), torch.randn(9, 4)
    expected = bare(first, second=second)
    answer = EmulatedDataParallel(bare, 3)(first, second=second)
    torch.testing.assert_close(answer["product"], expected["product"])
    assert answer["mean"].shape == (3,)
    torch.testing.assert_close(answer["mean"].mean(), expected["mean"])


def test_buffers_follow_the_first_replica():
    """As in torch's DataParallel, where only the first device's running statistics survive the forward."""
    module = EmulatedDataParallel(nn.BatchNorm1d(1, momentum=1.0), 2)
    module(torch.tensor([[1.0], [3.0], [100.0], [200.0]]))
    assert module.module.running_mean.item() == 2.0


class _Noise(nn.Module):
    def forward(self, inputs):
        return nn.functional.dropout(inputs, 0.5) + torch.rand_like(inputs) + torch.randn(inputs.shape)


def test_replicas_draw_from_generators_of_their_own():
    first, second, third = EmulatedDataParallel(_Noise(), 3)(torch.ones(300)).view(3, 100)
    assert not torch.equal(first, second) and not torch.equal(second, third)


def test_two_runs_with_dropout_and_one_seed_end_with_the_same_bits():
    """Each is a process of its own: a second training in one process adds the replicas' gradients in another order.

    Autograd orders nodes by numbers that each thread counts: the main thread counts on, and the replicas' are new.
    """
    trainings = []
    for seed in ("42", "42", "43"):
        ranks(1).stop()
        trainings += ranks(1).run(run_level, "01_data_parallel", [*SHORT, "--replicas", "3", "--seed", seed])
    first, second, other_seed = trainings
    assert max_weight_difference(first.weights, second.weights) == 0.0
    assert first.result["eval_loss"] == second.result["eval_loss"]
    assert max_weight_difference(first.weights, other_seed.weights) > 0


class _Fails(nn.Module):
    def forward(self, inputs):
        raise RuntimeError(f"no forward for {len(inputs)} samples")


def test_an_error_in_a_replica_reaches_the_caller():
    with pytest.raises(RuntimeError, match="no forward for 2 samples"):
        EmulatedDataParallel(_Fails(), 2)(torch.ones(4))


CPU, FIRST, SECOND, THIRD = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1", "cuda:2"))


@pytest.mark.parametrize(
    "gpus, first, replicas, devices",
    [
        (0, CPU, 2, [CPU]),
        (1, FIRST, 2, [FIRST]),  # emulated on one GPU: nn.DataParallel would run the bare module
        (2, FIRST, 1, [FIRST]),
        (2, FIRST, 2, [FIRST, SECOND]),
        (3, THIRD, 2, [THIRD, FIRST]),
        (3, SECOND, 3, [SECOND, THIRD, FIRST]),
    ],
)
def test_each_replica_has_a_gpu_or_they_are_emulated(gpus, first, replicas, devices, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert replica_devices(first, replicas) == devices


def test_the_generator_of_each_replicas_gpu_has_a_seed_of_its_own(monkeypatch):
    generators = [torch.Generator() for _ in range(3)]  # of the CPU, in place of the GPUs'
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    seed_replicas(7, [THIRD, FIRST])
    assert [generators[index].initial_seed() for index in (2, 0)] == [7, 8]
    assert torch.initial_seed() == 7
    expected = torch.rand(3, generator=torch.Generator().manual_seed(7))
    assert torch.equal(torch.rand(3), expected)
    assert not torch.equal(torch.rand(3, generator=generators[2]), torch.rand(3, generator=generators[0]))
