"""The plan of a run, before it starts: `python -m torchtitan_dp.plan`.

`signal` weighs noise against the signal, `recommend` tabulates choices by it; `cost` counts FLOPs;
`memory` runs the real step under fake tensors (`fake_step`, `tracker`), by lengths
(`peaks`), in a process of its own (`prediction`).
"""
