"""What `scripts/benchmark.py` is made of: arms, worker processes, measures, tables, plot."""
