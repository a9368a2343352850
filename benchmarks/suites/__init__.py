"""The measurements, each as a module to call; `test_suites` makes pytest-benchmark's tests of those that take time."""
