"""The measurements: `measure` of each module returns what its record holds. `python -m benchmarks` calls them.

`benchmarks.compare` calls `memory`, and pytest-benchmark `test_levels`.
"""
