"""The publishable part of a run: `python -m torchtitan_dp.release`.

`claims` has the terms that a release may claim and the names that its owner gives, `card` its model
card.
"""
