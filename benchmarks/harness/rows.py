"""Names that suites write into records and reports look for: of levels, and of the wrappers of a network."""

# All levels are held against level 00, and levels 03 and 04 also against level 02.
BASELINE = "00_single_gpu"
REPLICATED = "01_data_parallel"
RAW_DDP = "02_ddp_raw"
# The wrappers of `suites.memory` and `your_network`, which calls them strategies.
ONE_DEVICE = "one device"
DATA_PARALLEL = "DataParallel"
DDP = "DDP"
BUCKET_VIEWS = "DDP, bucket views"
FOREACH = "DDP, foreach AdamW"
FSDP2 = "FSDP2"
