"""DDP's options: a row whose weights are those of DDP without options is timed, and another one is refused."""

import pytest
import torch

from benchmarks.harness.groups import Extent
from benchmarks.suites import ddp_options
from benchmarks.suites.ddp_options import PLAIN, rank_facts, seconds_per_step, weights

ROW = "one bucket"
PROCESS = {"threads_per_process": 1}
EXTENT = Extent(rounds=2, seconds=0.1, data_flags=(), quick=True)


@pytest.fixture
def weights_of_row_are_off_by(monkeypatch):
    """`weights_of_row_are_off_by(distance)`: ranks that nobody starts, and that train `ROW` so far from the others."""

    def let(distance: float) -> None:
        class Ranks:
            def run(self, job, name=PLAIN, *_):
                if job is rank_facts:
                    return [PROCESS, PROCESS]
                if job is seconds_per_step:
                    return [0.1, 0.2]
                assert job is weights
                return [torch.full((3,), distance if name == ROW else 0.0, dtype=torch.float64)]

        monkeypatch.setattr(ddp_options, "ranks", lambda world_size: Ranks())

    return let


def test_weights_that_differ_by_rounding_are_the_same_training(weights_of_row_are_off_by):
    """cuDNN may sum in another order in every run."""
    weights_of_row_are_off_by(5e-11)
    record = ddp_options.measured((PLAIN, ROW), EXTENT)
    facts = record["rows"][ROW]
    assert facts["max_weight_difference"] == pytest.approx(5e-11)
    assert facts["max_weight_difference"] <= facts["tolerance"]
    assert PROCESS.items() <= facts.items()
    assert facts["median"] == pytest.approx(ddp_options.RANKS * ddp_options.BATCH_SIZE / 0.2)


@pytest.mark.parametrize("distance", [2e-9, float("nan")])
def test_other_weights_are_refused(weights_of_row_are_off_by, distance):
    weights_of_row_are_off_by(distance)
    with pytest.raises(ValueError, match=f"{ROW} is another training"):
        ddp_options.measured((PLAIN, ROW), EXTENT)
