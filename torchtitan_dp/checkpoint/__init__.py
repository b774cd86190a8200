"""A run's checkpoints: which are whole, how they are read safely, and what a start loads."""
