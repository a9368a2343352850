import pytest

from common.doctor.recorder import Recorder


@pytest.fixture
def recorder(monkeypatch, tmp_path):
    """A recorder whose wrappers are taken off after the test: `Recorder.wrap` calls the `setattr` of monkeypatch."""
    monkeypatch.setattr("common.doctor.recorder.setattr", monkeypatch.setattr, raising=False)
    recorder = Recorder(tmp_path, 0, tmp_path / "train.py")
    yield recorder
    assert recorder.record.observer_errors == {}
