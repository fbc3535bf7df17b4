"""Reports as tables for a terminal, as pictures, as pages."""
