"""Levels on a real GPU. Without one these tests are skipped."""

import itertools

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from common import ladder
from common.accelerator.utils.random import get_random_states, set_random_states
from common.weights import farthest
from tests.levels import EXACT, run_level
from tests.states import forget_states

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
# Level 02 needs torchrun, and level 01 takes several GPUs or computes in threads.
LEVELS = ["00_single_gpu", "03_accelerate", "04_trainer", *ladder.WITH_CHECKPOINTS]
STEPS = 9
EPOCH = ["--dataset", "synthetic", "--batch-size", "16", "--train-samples", str(16 * STEPS), "--eval-samples", "32"]


@pytest.fixture(autouse=True)
def fresh_states():
    forget_states()
    yield
    torch.cuda.set_sync_debug_mode("default")
    forget_states()


@pytest.mark.parametrize("level", LEVELS)
def test_a_gpu_trains_the_weights_of_the_cpu(level):
    _, of_gpu = run_level(level, [*EXACT, "--device", "cuda"])
    forget_states()
    _, of_cpu = run_level("00_single_gpu", [*EXACT, "--device", "cpu"])
    assert farthest(of_gpu, of_cpu) < 1e-9


@pytest.mark.parametrize("level", LEVELS)
def test_no_step_waits_for_a_gpu(level):
    """Between the first step and the last one of the epoch, torch raises where the CPU would wait."""
    steps = itertools.count(1)

    def watch_next_step(*_) -> None:
        torch.cuda.set_sync_debug_mode("error" if next(steps) < STEPS else "default")

    hook = register_optimizer_step_post_hook(watch_next_step)
    try:
        run_level(level, [*EPOCH, "--device", "cuda"])
    finally:
        hook.remove()
    assert next(steps) == STEPS + 1


def test_the_state_of_a_gpus_generator_is_restored():
    gpu = torch.device("cuda", 0)
    states = get_random_states(gpu)
    drawn = torch.rand(3, device=gpu)
    set_random_states(gpu, states)
    assert torch.rand(3, device=gpu).equal(drawn)
