"""Rows of records: names that suites write and reports look for, and sums over a row of memory."""

BASELINE = "00_single_gpu"  # the level that the others are held against
RAW_DDP = "02_ddp_raw"  # the level that levels 03 and 04 are held against
# How a network is trained: see `suites.memory` and `your_network`.
ONE_DEVICE = "one device"
DATA_PARALLEL = "DataParallel"
DDP = "DDP"
BUCKET_VIEWS = "DDP, bucket views"
FOREACH = "DDP, foreach AdamW"
FSDP = "FSDP2"


def totals(devices: list[dict[str, int]]) -> list[int]:
    """The bytes of each device, whose bytes by category are given."""
    return [sum(split.values()) for split in devices]
