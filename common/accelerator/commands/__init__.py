"""The command line: `python -m common.accelerator launch|config|test|env`."""
