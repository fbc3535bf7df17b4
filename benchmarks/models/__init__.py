"""Flax models as factories: `name(checkpoint=None, segment_size=1, ..., real=False) -> (loss, args)`.

One model a file; `common.py` puts `checkpoint` around segments of blocks, `data.py` brings real data.
See benchmarks/README.md.
"""
