"""Attacks on the trainer by its own makers: what `python -m torchtitan_dp.audit` runs."""
