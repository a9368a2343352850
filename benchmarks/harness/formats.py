"""Numbers as the tables show them."""


def milliseconds(seconds: float) -> str:
    """The number of milliseconds, with three digits or more."""
    value = 1000 * seconds
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def short(count: float) -> str:
    """Three digits and the prefix of a unit."""
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * size:
            digits = f"{count / size:#.3g}"  # keeps zeros, and leaves a bare dot at three whole digits
            return digits.removesuffix(".") + prefix
    return f"{count:.0f}"


def mib(size: float, digits: int | None = None) -> str:
    """The number of MiB with `digits` decimals; by default with more of them where it is small."""
    value = size / 2**20
    if digits is not None:
        return f"{value:.{digits}f}"
    if value >= 1000 or not size:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"
