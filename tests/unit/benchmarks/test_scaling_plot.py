"""The picture of strong and weak scaling: every bar is a ratio to level 00 on one device."""

import pytest

from benchmarks.report import scaling_plot
from benchmarks.suites import throughput

FEW_CORES = {"device": "cpu", "backend": "gloo", "dataset": "synthetic"}


@pytest.fixture
def groups(monkeypatch):
    """A record of all groups in which two devices reach 1.5 times one, and all cores 1.25 times."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(throughput, "available_cores", lambda: 2)
    found = []
    for size in throughput.BATCH_SIZES:
        for make_rows, make_record in (
            (throughput.strong_scaling, throughput.strong_scaling_record),
            (throughput.weak_scaling, throughput.weak_scaling_record),
        ):
            configurations = make_rows(size)
            timed = throughput.Throughput(configurations, 0.1, quick=True)
            # Rows are known in the order of the turns that they took.
            facts = {row.name: timed._facts(row.name, FEW_CORES) for row in reversed(configurations)}
            samples = {row.name: [1500.0 if row.workers > 1 else 1000.0] * 6 for row in configurations}
            samples["00_single_gpu, all cores"] = [1250.0] * 6
            found.append(make_record(size, samples, facts))
    return found


def test_a_bar_is_what_several_devices_reach_of_one(groups, report, tmp_path, coarse):
    for group in groups:
        reached = {name: pair["median"] for name, pair in scaling_plot.speed_ups(group).items()}
        several = [name for name in reached if "2 replicas" in name or "2 processes" in name]
        assert len(several) == 4 and {reached[name] for name in several} == {1.5}
        assert {name: reached[name] for name in reached.keys() - set(several)} == {"00_single_gpu, all cores": 1.25}
        assert [name[:2] for name in reached] == ["01", "02", "03", "04", "00"]
    assert scaling_plot.draw(groups, report["machine"], tmp_path) == ["scaling.png"]
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
