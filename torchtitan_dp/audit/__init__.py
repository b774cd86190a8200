"""Attacks on the trainer by its own authors: `python -m torchtitan_dp.audit`."""
