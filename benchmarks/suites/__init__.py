"""The measurements. `python -m benchmarks` calls `measure` of a module, which returns what its record holds.

`memory` is measured by `benchmarks.compare`, which also takes `throughput` in part.
"""
