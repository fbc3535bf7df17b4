"""Show reports as tables in a terminal, as pictures, and as pages."""
