"""The measurements, each as a module to call and a test for pytest-benchmark."""
