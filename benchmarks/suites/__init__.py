"""The measurements. `python -m benchmarks` calls `measure` of a module, which returns what its record holds.

`benchmarks.compare` uses parts of `throughput`, and `memory`. pytest-benchmark runs `test_levels`.
"""
