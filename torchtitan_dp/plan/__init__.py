"""What a run will cost, said before it starts: `python -m torchtitan_dp.plan`.

`signal` weighs noise against what is learned, `recommend` says it for people; `cost` counts FLOPs;
`memory` runs the real step under fake tensors (`fake_step`, `tracker`), by lengths
(`peaks`), in a process of its own (`prediction`).
"""
