"""Faults that selfcheck is asked to see, and faults that would make it blind.

The first are other rooms' mutants, held against the check that is there for them: it no longer
passes.
"""

import dataclasses

from tests.hazards.mutants import clipping, noise, whole
from tests.hazards.mutants.table import Mutant

POWER = "selfcheck/test_power.py::"
PASSES = f"{POWER}test_what_a_fault_fails_passes_without"
RESULT = "selfcheck/test_result.py::"
COMMAND = "selfcheck/test_command.py::"

ONE, TWO = f"{PASSES}[{{}}-1]", f"{PASSES}[{{}}-2]"
MICROBATCH = "clipped sum, microbatch, float32"
NOISE = "noise, "

# By room: the fault, and the test that must then fail.
SEEN = {
    clipping: {"norm without the other cp ranks": TWO.format(MICROBATCH)},
    whole: {"no clipping": ONE.format(MICROBATCH)},
    noise: {"half the noise": ONE.format(NOISE)},
}


def _seen() -> list[Mutant]:
    found = []
    for room, faults in SEEN.items():
        for mutant in room.MUTANTS:
            if mutant.fault in faults:
                test, fault = (faults[mutant.fault],), f"selfcheck sees {mutant.fault}"
                found.append(dataclasses.replace(mutant, fault=fault, tests=test, quick=False))
    assert len(found) == sum(len(faults) for faults in SEEN.values()), "a mutant was renamed"
    return found


MUTANTS = [
    *_seen(),
    Mutant(
        35,
        "selfcheck takes NaN for right",
        "selfcheck/run.py",
        "        return self.value <= self.bound  # NaN is not\n",
        "        return not self.value > self.bound\n",
        (f"{RESULT}test_json_is_json",),
        quick=True,
    ),
    Mutant(
        35,
        "selfcheck asks rank 0 alone",
        "selfcheck/run.py",
        "    for measured in zip(*lists, strict=True):\n",
        "    for measured in zip(*lists[:1], strict=True):\n",
        (f"{RESULT}test_one_rank_is_enough",),
        quick=True,
    ),
    Mutant(
        35,
        "selfcheck fails and says 0",
        "selfcheck/__main__.py",
        "        raise SystemExit(1)  # some",
        "        raise SystemExit(0)  # some",
        (f"{COMMAND}test_a_check_that_fails_is_a_line_with_a_remedy_and_exit_code_1",),
    ),
]
