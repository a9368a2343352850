"""Functions of a tensor on a GPU: where their result is, and for what the CPU waits."""

import pytest
import torch

from tests.gpu.imitation import imitated_process
from tests.gpu.labels import CPU
from tests.gpu.machine import LENGTH, READ

FIRST_GPU = torch.device("cuda", 0)
TO_CPU = "copy from cuda to cpu"


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize(
    "function, device, waits",
    [
        pytest.param(lambda x: x + torch.tensor(1), FIRST_GPU, [], id="sum"),
        pytest.param(lambda x: x[x > 0], FIRST_GPU, [LENGTH], id="mask"),
        pytest.param(lambda x: x[x.to(torch.uint8)], FIRST_GPU, [LENGTH], id="mask-of-bytes"),
        pytest.param(torch.unique, FIRST_GPU, [LENGTH], id="unique"),
        pytest.param(lambda x: x.index_put((x > 0,), 2 * x), FIRST_GPU, [LENGTH], id="mask-written"),
        pytest.param(lambda x: x.index_put_((x > 0,), torch.tensor(2.0)), FIRST_GPU, [], id="mask-filled"),
        pytest.param(lambda x: x[: len(f"{x}")], FIRST_GPU, [READ], id="printed"),
        pytest.param(lambda x: torch.zeros_like(x, device="cpu"), CPU, [], id="zeros_like"),
        pytest.param(lambda x: torch.ones(3, device="cpu:0"), CPU, [], id="cpu:0"),
        pytest.param(lambda x: torch.as_tensor(x, device="cpu"), CPU, [TO_CPU], id="as_tensor"),
        pytest.param(lambda x: x.cpu(memory_format=torch.preserve_format), CPU, [TO_CPU], id="cpu"),
        pytest.param(lambda x: torch.from_numpy(x.numpy(force=True)), CPU, [TO_CPU], id="numpy"),
        pytest.param(lambda x: torch.ones(3).copy_(x, non_blocking=True), CPU, [TO_CPU], id="to-pageable"),
        pytest.param(lambda x: torch.ones(3).pin_memory("cuda").copy_(x, non_blocking=True), CPU, [], id="to-pinned"),
        pytest.param(lambda x: torch.ones(3).pin_memory().to(x.device, non_blocking=True), FIRST_GPU, [], id="pinned"),
    ],
)
def test_a_result_has_a_device_and_a_wait_is_noted(function, device, waits):
    with imitated_process() as machine:
        x = torch.ones(3, device=FIRST_GPU)
        assert function(x).device == device
    assert machine.waits == [waits]
