"""The names of the levels, which are folders, and of the scripts in them that have flags of their own."""

LEVELS = ("00_single_gpu", "01_data_parallel", "02_ddp_raw", "03_accelerate", "04_trainer")
ONE_PROCESS = LEVELS[:2]
DISTRIBUTED = LEVELS[2:]
WITH_REPLICAS = LEVELS[1:2]
NEED_TORCHRUN = LEVELS[2:3]
# The Accelerator reads the variables of `python -m common.accelerator launch`.
WITH_ACCELERATOR = LEVELS[3:]
MESH = "02_ddp_raw/train_mesh"
# These scripts have mixed precision and gradient accumulation too.
WITH_CHECKPOINTS = ("03_accelerate/train_full", "04_trainer/train_full")
