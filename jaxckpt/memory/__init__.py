"""The memory that a program needs: targets, compiled memory, residuals, estimates, comparisons."""
