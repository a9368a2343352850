"""`split_between_processes`: inputs of every kind are split in order, and the script's own stay as they are."""

import pytest
import torch

from tests.unit.accelerator.several_processes import played_states


class Rows:
    with_format = None

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def select(self, numbers):
        return Rows([self.rows[number] for number in numbers])


KINDS = {
    "list": list,
    "tuple": tuple,
    "tensor": torch.tensor,
    "tensor of rows": lambda numbers: torch.tensor(numbers)[:, None].repeat(1, 2),
    "data set": Rows,
    "dict": lambda numbers: {"list": list(numbers), "tensor": torch.tensor(numbers)},
}


def numbers_of(share):
    if isinstance(share, dict):
        assert numbers_of(share["list"]) == numbers_of(share["tensor"])
        share = share["list"]
    if isinstance(share, Rows):
        share = share.rows
    if isinstance(share, torch.Tensor) and share.dim() == 2:
        share = share[:, 1]
    return [int(number) for number in share]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n", "padded", "expected"),
    [
        (0, True, [[], [], []]),
        (2, True, [[0], [1], [1]]),
        (5, False, [[0, 1], [2, 3], [4]]),
        (7, False, [[0, 1, 2], [3, 4], [5, 6]]),
        (7, True, [[0, 1, 2], [3, 4, 6], [5, 6, 6]]),
    ],
)
def test_inputs_are_split_in_order_and_padded_with_the_last(kind, n, padded, expected):
    inputs = KINDS[kind](list(range(n)))
    shares = []
    for state in played_states(3):
        with state.split_between_processes(inputs, padded) as share:
            shares.append(numbers_of(share))
    assert shares == expected
    assert numbers_of(inputs) == list(range(n))  # accelerate cuts the values of a dict in place


def test_split_between_processes_gives_a_text_whole_to_all_and_refuses_a_number():
    for state in played_states(3):
        with state.split_between_processes("abcde") as share:
            assert share == "abcde"
        with pytest.raises(TypeError, match="has no len"), state.split_between_processes({"x": 5}):
            pass
