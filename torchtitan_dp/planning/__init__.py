"""What a run will cost: FLOPs, and memory by running the real step under fake tensors."""
