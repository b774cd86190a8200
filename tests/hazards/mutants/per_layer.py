"""Faults of clipping by groups: rows 1, 2, 4 and 28."""

from tests.hazards.mutants.clipping import EXACT, HERE, SUM
from tests.hazards.mutants.table import Mutant

GROUPS = "privacy/test_clipping.py::"
BOUND = f"{HERE}test_row02_the_whole_gradient_is_bound_by_C"

MUTANTS = [
    Mutant(
        1,
        "a groups norm of one cp ranks part",
        SUM,
        "self._over_cp(torch.stack(squares).sum(0, keepdim=True))",
        "torch.stack(squares).sum(0, keepdim=True)",
        (f"{EXACT}[grad_sample-(1, 1, 4)]",),
    ),
    Mutant(
        2,
        "every group clipped to C",
        "privacy/clipping.py",
        "squared_norm_GB.new_full((1, 1), bound)",
        "squared_norm_GB.new_full((1, 1), self.max_grad_norm)",
        (f"{BOUND}[(1, 1, 1)-microbatch]", f"{BOUND}[(1, 1, 1)-V2]"),
    ),
    Mutant(
        2,
        "shares of C that add up to more",
        "privacy/clipping.py",
        "(self.max_grad_norm / math.sqrt(len(self.members)),)",
        "(self.max_grad_norm / len(self.members) ** 0.25,)",
        (f"{GROUPS}test_row02_a_sample_that_is_large_in_every_layer_counts_at_most_C[7-vanilla]",),
        quick=True,
    ),
    Mutant(
        4,
        "the setting is not handed on",
        "gradients/methods.py",
        "clip_policy(parameters, privacy, max_grad_norm=max_grad_norm)",
        "clip_policy(parameters, Privacy(), max_grad_norm=max_grad_norm)",
        (f"{EXACT}[grad_sample, whole-(1, 1, 1)]",),
    ),
]
