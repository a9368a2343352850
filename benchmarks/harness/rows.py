"""Names of rows that suites write and reports look for."""

# All levels are held against level 00, and levels 03 and 04 also against level 02.
BASELINE = "00_single_gpu"
REPLICATED = "01_data_parallel"
RAW_DDP = "02_ddp_raw"
# How a network is trained: see `suites.memory` and `your_network`.
ONE_DEVICE = "one device"
DATA_PARALLEL = "DataParallel"
DDP = "DDP"
BUCKET_VIEWS = "DDP, bucket views"
FOREACH = "DDP, foreach AdamW"
FSDP_ROW = "FSDP2"  # a row; `ladder.FSDP` is the script 02_ddp_raw/train_fsdp
