"""The publishable part of a run: `python -m torchtitan_dp.release`.

`claims` are the terms that a release may claim, `names` those that its owner gives, `card` is its
model card.
"""
