"""One solver a file, one signature: (chain, budget) -> schedule or None."""
