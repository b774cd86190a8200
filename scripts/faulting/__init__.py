"""What `scripts/faults.py` is made of."""
