"""TODO. Comes in: todo. Goes out: todo."""
