"""The planner's model of a program, a chain of stages with candidates, and what solves it for a budget of bytes."""
