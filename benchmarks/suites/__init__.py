"""The measurements: `measure` of each module returns what its record holds. `python -m benchmarks` calls them.

`test_levels` is for pytest-benchmark.
"""
