"""Reports of results: tables, verdicts, plots, the numbers in the READMEs.

They read the records of `benchmarks.harness.records`, and that of `benchmarks.compare`, results.json:

    {
      "machine": {…}, "began": {…}, "ended": {…},  as in the record of a suite
      "world_size": 2,                             processes, or replicas
      "cores_per_device": 1,                       where speeds are timed; null on GPUs
      "global_batch_size": 64, "steps": 937,       of each level's run
      "proof_steps": 10,                           before weights are compared
      "levels": {
        "02_ddp_raw": {
          "run": {…},                              what the level's --json writes
          "max_weight_difference": 1.1e-16, "weight_checksum": "3ada1f62",
          "simulated_peak_memory": [{"parameters": 4801024, …}, …],    bytes of each device by category
          "evaluated_on": {"3": 10000}, "eval_loss_sum": 23012.1       by the number of ranks; not at level 01
        }, …
      },
      "sharded": {"02_ddp_raw/train_fsdp": {…}, …},    likewise: weights and memory
      "throughput": [{…}, …],                          a group of `benchmarks.harness.records` for each batch
      "memory": [{…}, …]                               rows of `benchmarks.suites.memory`
    }
"""
