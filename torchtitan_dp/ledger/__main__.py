"""`python -m torchtitan_dp.ledger`: the command `ledger`, which lies above this room."""

import runpy

if __name__ == "__main__":
    runpy.run_module("torchtitan_dp.release.ledgers", run_name="__main__", alter_sys=True)
