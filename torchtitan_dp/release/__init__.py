"""The publishable part of a run: `python -m torchtitan_dp.release`.

`claims` are the terms that a release may claim, `card` is its model card.
"""
