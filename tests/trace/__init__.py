"""Hand-made traces."""
