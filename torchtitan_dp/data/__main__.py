"""`python -m torchtitan_dp.data`: the command `prepare`, which lies above this room."""

import runpy

if __name__ == "__main__":
    runpy.run_module("torchtitan_dp.plan.prepare", run_name="__main__", alter_sys=True)
