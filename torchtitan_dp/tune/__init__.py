"""A search for a recipe by published held-out losses, at an epsilon of all trials together."""
