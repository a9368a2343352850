"""The collator for samples that are dicts stacks them as transformers does."""

import numpy as np
import pytest
import torch

from common.trainer import default_data_collator

LABELLED = {
    "numbers": {"label": 0.5},
    "arrays": {"label": np.array([1, 0])},
    "tensors": {"label": torch.tensor(3, dtype=torch.int32)},
    "tensors of numbers": {"label": torch.tensor(0.5, dtype=torch.float64)},
}


@pytest.mark.parametrize("name", LABELLED)
def test_dicts_are_stacked_alike(name, transformers):
    left_out = {"text": "a", "none": None}
    columns = {"x": torch.ones(2), "array": np.ones(3), "number": 0.5, **left_out}
    samples = [columns | LABELLED[name] for _ in range(3)]
    ours = default_data_collator(samples)
    theirs = transformers.default_data_collator(samples)
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert tensor.dtype == theirs[key].dtype
        assert torch.equal(tensor, theirs[key])
