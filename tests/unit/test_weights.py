"""Weights are compared by their largest difference, or by a checksum."""

import pytest
import torch

from common.weights import checksum, max_weight_difference


def test_equal_weights_have_equal_checksums_and_no_distance():
    weights = {"a": torch.tensor([0.1234, 2.0], dtype=torch.float64), "b": torch.zeros(2, 2, dtype=torch.float64)}
    near = {name: value + 1e-13 for name, value in weights.items()}
    far = weights | {"a": weights["a"] + 1e-3}
    assert checksum(near) == checksum(weights) != checksum(far)
    assert max_weight_difference(near, weights) == pytest.approx(1e-13, rel=0.1)
    for name in weights:
        broken = weights | {name: torch.full_like(weights[name], torch.nan)}
        assert max_weight_difference(broken, weights) == float("inf")
    assert max_weight_difference({"w": torch.empty(0)}, {"w": torch.empty(0)}) == 0
    with pytest.raises(ValueError, match=r"shapes \(1,\) and \(5,\)"):
        max_weight_difference({"w": torch.ones(1)}, {"w": torch.ones(5)})
    with pytest.raises(ValueError, match="only one of two networks has module"):
        max_weight_difference(weights | {"module.a": weights["a"]}, weights)
