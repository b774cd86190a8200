"""Replay of neighbours: two whole runs, of which the second is given the outputs of the first.

After Re:cord-play (Cebere et al., PETS 2026, arXiv 2602.17454). Two data sets differ in one unit.
The first run's outputs of the mechanism, the noised gradients at `optimizer.step`, are recorded; in
the second run they replace its own. All else that leaves either run may then depend on public facts
and on these outputs alone, so it must be equal: a difference is a leak that no row of the hazards
had to foresee. What is allowed to differ, and why, is in `allowed`.

Both runs have the same keys, and so the same noise. Their outputs therefore differ by the two
clipped sums alone: at most C, divided by the expected batch size, at each step.

Out of its sight is a fault that is equal on both sides: noise that is too small, a key used twice,
an accountant that errs, a draw with another rate than the ledger's. So are timing and memory, but
for their effects on a run's course, and records' lengths where `allowed` names them.
"""
