"""fedfit's coordinator: runs the rounds, keeps the updates, makes the models."""
