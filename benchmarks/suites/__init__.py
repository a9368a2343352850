"""The measurements. `python -m benchmarks` calls `measure` of a module, which returns what its record holds.

`benchmarks.compare` uses parts of `throughput`, and `memory`. `timeline` records steps of `gradient_averaging`.
pytest-benchmark runs `test_levels`.
"""
