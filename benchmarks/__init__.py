"""Models, data and scripts that answer one question each; run from the root of the repository."""
