"""What may be published of a run: `python -m torchtitan_dp.release`.

`claims` says what a release may claim, `card` how it says so, `owner` what its owner must add.
"""
