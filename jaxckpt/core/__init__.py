"""What every other part talks in: graphs, actions, plans, and the emitter that turns a plan into a function."""
