"""The plan of a run, before it starts: `python -m torchtitan_dp.plan`.

`signal` weighs noise against the signal; `roofline` counts FLOPs and predicts seconds of machines,
`choose` takes the fastest setting; `memory` asks `prediction`, a process that runs the real step
under fake tensors (`fake_step`).
"""
