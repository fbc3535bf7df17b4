"""Random programs on which everything that jaxckpt promises is checked: `python -m tests.fuzz --help`."""
