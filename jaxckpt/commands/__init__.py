"""The commands of the command line, one file each; `base.py` says what a command is, `output.py` writes."""
