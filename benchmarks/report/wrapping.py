"""Text for a terminal of 80 columns."""

import textwrap

WIDTH = 80


def wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_on_hyphens=False)
