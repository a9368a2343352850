"""Programs written for accelerate run on the core: the wheel's own test scripts, and transformers' Trainer.

`tests.parity.alias` gives the core the name of the original, on ranks that have not imported the original. So this
file, which they import, does not import it either.
"""

import contextlib
import importlib.util
import io
import runpy
from unittest import mock

import pytest

from common.processes import Ranks, ranks
from tests.bits import digest
from tests.parity import alias, random_trainers
from tests.peers import import_or_skip
from tests.states import ONE_THREAD, forget_states, on_a_rank, reset_states

SCRIPTS = "accelerate.test_utils.scripts"
ON_CPU = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", **ONE_THREAD}


def with_alias(job, *arguments):
    """A job for a rank: `accelerate` is the core there from now on."""
    alias.install()
    result = job(*arguments)
    alias.assert_original_is_idle()
    return result


@pytest.fixture(scope="module")
def on_the_core():
    """`on_the_core(world_size, job, …)`: the results of a job on ranks that have the alias."""
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    pools = {world_size: Ranks(world_size) for world_size in (1, 2)}

    def run(world_size, job, *arguments):
        return pools[world_size].run(with_alias, job, *arguments, timeout=250, environment=ON_CPU)

    yield run
    for pool in pools.values():
        pool.stop()


def run_script(name: str) -> str:
    """Run a script of the wheel from its beginning to its end; returns what it prints."""
    # A script that forgets the states by a private method, and then prepares a model, gets an error from the original.
    # Here the Accelerator knows the state that it had. Without pytest, test_script leaves this check out.
    without_pytest = mock.patch("accelerate.utils.is_pytest_available", return_value=False)
    with without_pytest, contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_module(f"{SCRIPTS}.{name}", run_name="__main__")
    forget_states()
    return out.getvalue()


# With one process, test_sync fails on accelerate too.
@pytest.mark.slow
@pytest.mark.parametrize("name, expected", [("test_script", "Test"), ("test_sync", "Test"), ("test_cli", "Success")])
def test_a_script_of_the_wheel_passes_on_the_core(name, expected, on_the_core):
    printed, _ = on_the_core(2, run_script, name)
    assert expected in printed


@on_a_rank
def train_with_transformers(seeds: range, world_size: int, folder: str) -> tuple[str, list]:
    """Each training from its beginning, and then once more from its first checkpoint."""
    outcomes = []
    for seed, script in zip(seeds, random_trainers.TRAINERS.scripts(seeds, world_size), strict=True):
        script.arguments |= {"save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
        script.arguments["load_best_model_at_end"] = False
        script.train_twice = script.early_stopping = False
        if world_size > 1:  # Where the main process reads for all, the original skips other batches.
            script.accelerator_config["dispatch_batches"] = False
        straight = {}
        random_trainers.run("transformers", script, f"{folder}/{seed}", straight)
        reset_states()
        resumed = random_trainers.make_trainer("transformers", script, f"{folder}/resumed-{seed}")
        resumed.train(resume_from_checkpoint=f"{folder}/{seed}/checkpoint-1")
        weights = {name: digest(weight) for name, weight in resumed.model.state_dict().items()}
        outcomes += [straight, weights]
        reset_states()
    return type(resumed.accelerator).__module__, outcomes


@pytest.mark.parametrize(
    "world_size, seeds",
    [pytest.param(2, range(4), marks=pytest.mark.slow), pytest.param(1, range(30), marks=pytest.mark.long)],
)
def test_transformers_trainer_ends_with_the_bits_that_it_has_on_accelerate(world_size, seeds, on_the_core, tmp_path):
    import_or_skip("transformers")
    ours = on_the_core(world_size, train_with_transformers, seeds, world_size, str(tmp_path / "ours"))
    arguments = (seeds, world_size, str(tmp_path / "theirs"))
    theirs = ranks(world_size).run(train_with_transformers, *arguments, timeout=250, environment=ON_CPU)
    for (library, outcomes), (original, expected) in zip(ours, theirs, strict=True):
        assert (library, original) == ("common.accelerator.accelerator", "accelerate.accelerator")
        assert outcomes == expected
