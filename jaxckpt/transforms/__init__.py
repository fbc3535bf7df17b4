"""Function transforms: one function, a sequence of layers, a scan."""
