"""The largest batch size that fits into memory is found as in accelerate."""

import pytest

from common.accelerator.utils import find_executable_batch_size


def batch_sizes_tried(library, largest_that_fits):
    sizes = []

    @library.find_executable_batch_size(starting_batch_size=60)
    def train(batch_size, model):
        sizes.append(batch_size)
        if batch_size > largest_that_fits:
            raise RuntimeError("CUDA out of memory.")
        return model

    if largest_that_fits == 0:
        with pytest.raises(RuntimeError, match="No executable batch size found, reached zero"):
            train("model")
        return sizes
    assert train("model") == "model" and train("again") == "again"
    return sizes


@pytest.mark.parametrize("largest_that_fits", [50, 0])
def test_the_batch_size_shrinks_as_in_accelerate(largest_that_fits, utils_of_both):
    ours, theirs = (batch_sizes_tried(library, largest_that_fits) for library in utils_of_both)
    assert ours == theirs and len(ours) > 2


def test_a_function_of_any_number_of_arguments_can_be_retried():
    count = find_executable_batch_size(lambda *arguments: len(arguments))
    assert count(1, 2, 3) == 4
