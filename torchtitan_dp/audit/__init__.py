"""Attacks on the trainer by its own makers: `python -m torchtitan_dp.audit`."""
