"""What a program needs: targets to compile for, what the compiler says, residuals, estimates, comparisons."""
