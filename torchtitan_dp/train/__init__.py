"""A run: what is checked before it, its loop, and what is seen of it."""
