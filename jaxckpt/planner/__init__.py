"""The planner's model of a program, a chain of stages with choices, and what solves it for a budget of bytes."""
