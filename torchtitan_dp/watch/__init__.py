"""What a run shows while it trains: scalars, a progress line, TensorBoard and W&B."""
