"""Numbers and findings in the texts hold: in the scripts, in the record, and where they can be computed."""

import pytest

from benchmarks.report import page_tables
from benchmarks.report.cells import speed_ups
from common import ladder
from common.eval_sampler import DistributedEvalSampler
from tests.levels import code_lines


@pytest.mark.parametrize("level", ladder.LEVELS)
def test_the_readme_says_how_many_lines_a_level_has(level):
    assert f"\n| [{level}] | {len(code_lines(level))} |" in (ladder.ROOT / "README.md").read_text()


def test_ddp_gains_with_the_batch_and_reaches_all_cores_as_the_readme_says():
    def speed_up(group: dict, level: str) -> float:
        return speed_ups(group)[page_tables.row_of(group, level)]["median"]

    def speed_up_of_all_cores(group: dict) -> float:
        (row,) = [row for row, values in group["rows"].items() if values["all_cores"]]
        return speed_ups(group)[row]["median"]

    small, large = page_tables.recorded("results")["throughput"]
    for level in ladder.DISTRIBUTED:
        assert 1 < speed_up(small, level) < speed_up(large, level) < 2
        assert speed_up(small, "01_data_parallel") < speed_up(small, level)
        assert speed_up(small, level) < speed_up_of_all_cores(small)
        assert speed_up(large, level) >= speed_up_of_all_cores(large)


def test_three_ranks_evaluate_as_many_images_as_level_02s_page_says():
    shards = [len(DistributedEvalSampler(range(10_000), num_replicas=3, rank=rank)) for rank in range(3)]
    text = " ".join((ladder.ROOT / "02_ddp_raw" / "README.md").read_text().split())
    assert "of the 10,000 test images three ranks evaluate {}, {} and {}".format(*shards) in text
