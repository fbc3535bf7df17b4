"""Checkpointing in other libraries and in jaxckpt, on the same four models; see `__main__`."""
