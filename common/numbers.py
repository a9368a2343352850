"""Numbers that flags take; others are refused with what is expected."""

import argparse
import math
import sys
from typing import Any


def number(text: str, kind: type, least: float, description: str, most: float = sys.float_info.max) -> Any:
    """`text` as an int or a float from `least` to `most`.

    Raises:
        argparse.ArgumentTypeError: if it is none; argparse prints it with the flag's name.
    """
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not (least <= value <= most):
        raise argparse.ArgumentTypeError(f"must be {description}, not {text!r}")
    return value


def positive(text: str) -> int:
    return number(text, int, 1, "a whole number of at least 1")


def natural(text: str) -> int:
    return number(text, int, 0, "a whole number of at least 0")


def positive_float(text: str) -> float:
    return number(text, float, math.ulp(0.0), "a number above 0")
