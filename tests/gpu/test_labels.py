"""Functions of a tensor on a GPU: where their result is, and for what the CPU waits."""

import pytest
import torch

from tests.gpu.imitation import imitated_process
from tests.gpu.labels import CPU
from tests.gpu.machine import LENGTH

FIRST_GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    "function, device, waits",
    [
        (lambda x: x + torch.tensor(1), FIRST_GPU, []),
        (lambda x: x[x > 0], FIRST_GPU, [LENGTH]),
        (torch.unique, FIRST_GPU, [LENGTH]),
        (lambda x: x.index_put((x > 0,), 2 * x), FIRST_GPU, [LENGTH]),
        (lambda x: x.index_put_((x > 0,), torch.tensor(2.0)), FIRST_GPU, []),
        (lambda x: torch.zeros_like(x, device="cpu"), CPU, []),
        (lambda x: torch.as_tensor(x, device="cpu"), CPU, ["copy from cuda to cpu"]),
        (lambda x: x.cpu(memory_format=torch.preserve_format), CPU, ["copy from cuda to cpu"]),
        (lambda x: torch.from_numpy(x.numpy(force=True)), CPU, ["copy from cuda to cpu"]),
        (lambda x: torch.ones(3).pin_memory("cuda").to(x.device, non_blocking=True), FIRST_GPU, []),
    ],
    ids=["sum", "mask", "unique", "mask-written", "mask-filled", "zeros_like", "as_tensor", "cpu", "numpy", "pinned"],
)
def test_a_result_has_a_device_and_a_wait_is_noted(function, device, waits):
    with imitated_process() as machine:
        x = torch.ones(3, device=FIRST_GPU)
        assert function(x).device == device
    assert machine.waits == [waits]
