"""Types of flags that take numbers: others are refused with what is expected."""

import argparse
import math
import sys
from typing import Any


def number(text: str, kind: type, description: str, least: float, most: float = sys.float_info.max) -> Any:
    """`text` as an int or a float from `least` to `most`.

    Raises argparse.ArgumentTypeError if it is not such a number; argparse prints the message with the flag's name.
    """
    refusal = argparse.ArgumentTypeError(f"must be {description}, not {text!r}")
    try:
        value = kind(text)
    except ValueError:
        raise refusal from None
    if not (least <= value <= most):  # NaN is outside too.
        raise refusal
    return value


def positive(text: str) -> int:
    return number(text, int, "a whole number of at least 1", 1)


def natural(text: str) -> int:
    return number(text, int, "a whole number of at least 0", 0)


def positive_float(text: str) -> float:
    smallest = math.nextafter(0, 1)
    return number(text, float, "a number above 0", smallest)
