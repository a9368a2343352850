"""The synthetic digits: deterministic, balanced, cached whole, and hard enough."""

import pytest
import torch

from common.data import synthetic
from common.data.synthetic import draw_cache, draw_sets, read_synthetic
from common.errors import UserError


def test_a_seed_draws_the_same_digits_again():
    first, second = (draw_sets(3, {"train": 300, "t10k": 50}) for _ in range(2))
    other = draw_sets(4, {"train": 300, "t10k": 50})
    for part in first:
        assert torch.equal(first[part][0], second[part][0]) and torch.equal(first[part][1], second[part][1])
        assert not torch.equal(first[part][0], other[part][0])


def test_digits_have_mnists_format():
    images, labels = draw_sets(3, {"train": 2000})["train"]
    assert images.shape == (2000, 28, 28) and images.dtype == labels.dtype == torch.uint8
    assert labels.bincount(minlength=10).min() > 150 and labels.max() == 9
    ink = images.float().mean(dim=(1, 2)) / 255
    assert 0.05 < ink.mean() < 0.3 and ink.min() > 0.005


def test_the_cache_appears_when_it_is_complete(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(synthetic, "SIZES", {"train": 20, "t10k": 10})

    def interrupted(sets, path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            draw_cache()
    assert list((tmp_path / "parallelism-ladder").iterdir()) == []
    assert [len(labels) for _, labels in read_synthetic()] == [20, 10]
    for damaged in (b"half", b"\x80\x02", b"\xff" * 40, b""):
        draw_cache().write_bytes(damaged)
        with pytest.raises(UserError, match="is damaged"):
            read_synthetic()
