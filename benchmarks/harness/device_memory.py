"""The memory of devices, of which records keep the bytes by category."""


def totals(devices: list[dict[str, int]]) -> list[int]:
    """The bytes of each device, whose bytes by category are given."""
    return [sum(split.values()) for split in devices]
