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
GRAD_SAMPLE = "clipped sum, grad_sample, float32"
NOISE, UPDATE = "noise, ", "update, microbatch"

# By room: the fault, and the test that must then fail.
SEEN = {
    clipping: {
        "norm without the other cp ranks": TWO.format(MICROBATCH),
        "sum of partial norms": ONE.format(MICROBATCH),
        "squared before the sum over cp": TWO.format(MICROBATCH),
        "V2 keeps its own tokens part of vectors": TWO.format(GRAD_SAMPLE),
        "one norm for the microbatch": ONE.format(GRAD_SAMPLE),
        "loss over the microbatches targets": ONE.format(GRAD_SAMPLE),
        "a rank divides by its own targets": TWO.format(MICROBATCH),
        "records see each other in the model": ONE.format(GRAD_SAMPLE),
    },
    whole: {
        "no clipping": ONE.format(MICROBATCH),
        "bad samples kept": ONE.format(MICROBATCH),
        "noise repeated across parameters": ONE.format(NOISE),
    },
    noise: {
        "no noise": ONE.format(NOISE),
        "half the noise": ONE.format(NOISE),
        "noise not scaled by C": ONE.format(NOISE),
        "noise shared out over the ranks": TWO.format(NOISE),
        "all shards given the first ones noise": TWO.format(NOISE),
        "one key for all steps": ONE.format(NOISE),
        "not divided": ONE.format(UPDATE),
    },
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
        "selfcheck/result.py",
        "        return self.value <= self.bound  # NaN is not\n",
        "        return not self.value > self.bound\n",
        (f"{RESULT}test_json_is_json",),
        quick=True,
    ),
    Mutant(
        35,
        "selfcheck overlooks NaN beside numbers",
        "selfcheck/result.py",
        "    return math.nan if any(map(math.isnan, values)) else max(values)\n",
        "    return max(values)\n",
        (f"{RESULT}test_the_worst_is_nan_wherever_it_stands",),
        quick=True,
    ),
    Mutant(
        35,
        "selfcheck asks rank 0 alone",
        "selfcheck/result.py",
        "    for measured in zip(*lists, strict=True):\n",
        "    for measured in zip(*lists[:1], strict=True):\n",
        (f"{RESULT}test_one_rank_is_enough",),
        quick=True,
    ),
    Mutant(
        35,
        "selfcheck forgets who could not measure",
        "selfcheck/result.py",
        "    if errors:\n",
        "    if len(errors) == len(ranks):\n",
        (f"{RESULT}test_an_error_on_one_rank_is_the_outcome",),
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
    Mutant(
        35,
        "selfcheck leaves its checkpoint",
        "selfcheck/checkpoints.py",
        "            shutil.rmtree(folder, ignore_errors=True)\n",
        "            pass\n",
        (f"{COMMAND}test_alone_it_passes_and_leaves_json_only",),
    ),
    Mutant(
        35,
        "selfcheck covers one method",
        "selfcheck/terms.py",
        "            for method in METHODS:\n",
        "            for method in list(METHODS)[:1]:\n",
        ("selfcheck/test_terms.py::test_every_method_is_checked[1]",),
        quick=True,
    ),
    Mutant(
        35,
        "selfcheck on attention of other heads",
        "selfcheck/terms.py",
        "        dim=args.dim // args.n_heads * shared * kv_heads,\n",
        "        dim=64 * shared * kv_heads,\n",
        ("selfcheck/test_terms.py::test_shipped_configurations[llama3_8b_16k]",),
        quick=True,
    ),
    Mutant(
        35,
        "selfcheck goes on with ranks out of step",
        "selfcheck/run.py",
        "            break\n",
        "            pass\n",
        (f"{COMMAND}test_a_rank_that_cannot_go_on_ends_all_with_a_line[raises]",),
    ),
    Mutant(
        35,
        "selfcheck waits for ever alone",
        "selfcheck/ranks.py",
        "            os._exit(1)\n",
        "            pass\n",
        (
            f"{COMMAND}test_a_rank_that_cannot_go_on_ends_all_with_a_line"
            "[leaves the others waiting]",
        ),
    ),
]
