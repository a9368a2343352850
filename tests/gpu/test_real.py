"""Levels and generators on a real GPU. Without one these tests are skipped."""

import itertools

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from common import ladder
from common.accelerator.utils.random import get_random_states, set_random_states
from common.weights import max_weight_difference
from tests.levels import EXACT, run_level
from tests.states import forget_states

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
# Level 02 needs torchrun, and level 01 takes several GPUs or computes in threads.
LEVELS = ["00_single_gpu", "03_accelerate", "04_trainer", *ladder.WITH_CHECKPOINTS]


@pytest.mark.parametrize("level", LEVELS)
def test_a_gpu_trains_the_weights_of_the_cpu_and_second_steps_do_not_wait(level):
    """An epoch has two steps. After the first one and until the end of the second torch raises where the CPU waits."""
    modes = itertools.cycle(["error", "default"])
    hook = register_optimizer_step_post_hook(lambda *_: torch.cuda.set_sync_debug_mode(next(modes)))
    try:
        _, of_gpu = run_level(level, [*EXACT, "--device", "cuda"])
    finally:
        hook.remove()
        torch.cuda.set_sync_debug_mode("default")
        forget_states()
    _, of_cpu = run_level("00_single_gpu", [*EXACT, "--device", "cpu"])
    assert max_weight_difference(of_gpu, of_cpu) < 1e-9


def test_the_state_of_a_gpus_generator_is_restored():
    gpu = torch.device("cuda", 0)
    states = get_random_states(gpu)
    drawn = torch.rand(3, device=gpu)
    set_random_states(gpu, states)
    assert torch.rand(3, device=gpu).equal(drawn)
