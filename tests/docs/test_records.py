"""Numbers and findings in the texts hold: in the scripts, in the record, and where they can be computed."""

import pytest

from benchmarks.harness.records import Group, read_group
from benchmarks.harness.rows import BASELINE
from benchmarks.report import page_tables
from common import ladder
from common.eval_sampler import DistributedEvalSampler
from tests.levels import code_lines


@pytest.mark.parametrize("level", ladder.LEVELS)
def test_the_readme_says_how_many_lines_a_level_has(level):
    assert f"\n| [{level}] | {len(code_lines(level))} |" in (ladder.ROOT / "README.md").read_text()


def test_ddp_gains_with_the_batch_and_reaches_all_cores_as_the_readme_says():
    def speed_up(group: Group, level: str) -> float:
        return group.compared_with(BASELINE)[page_tables.row_of(group, level)].summary.median

    def speed_up_of_all_cores(group: Group) -> float:
        (name,) = [name for name, row in group.rows.items() if row.facts["all_cores"]]
        return group.compared_with(BASELINE)[name].summary.median

    small, large = map(read_group, page_tables.recorded("results")["throughput"])
    for level in ladder.DISTRIBUTED:
        assert 1 < speed_up(small, level) < speed_up(large, level) < 2
        assert speed_up(small, "01_data_parallel") < speed_up(small, level)
        assert speed_up(small, level) < speed_up_of_all_cores(small)
        assert speed_up(large, level) >= speed_up_of_all_cores(large)


def test_three_ranks_evaluate_as_many_images_as_level_02s_page_says():
    shards = [len(DistributedEvalSampler(range(10_000), num_replicas=3, rank=rank)) for rank in range(3)]
    text = " ".join((ladder.ROOT / "02_ddp_raw" / "README.md").read_text().split())
    assert "of the 10,000 test images three ranks evaluate {}, {} and {}".format(*shards) in text
