"""Faults that selfcheck is asked to see, and faults that would make it blind.

The first are other rooms' mutants, held against one test: selfcheck no longer passes.
"""

import dataclasses

from tests.hazards.mutants import clipping, noise, whole
from tests.hazards.mutants.table import Mutant

POWER = "selfcheck/test_power.py::"
PASSES = {ranks: f"{POWER}test_it_passes_here[{ranks}]" for ranks in (1, 2)}
RESULT = "selfcheck/test_result.py::"
COMMAND = "selfcheck/test_command.py::"

# By room: the fault, and on how many ranks it is looked for.
SEEN = {
    clipping: {
        "norm without the other cp ranks": 2,
        "sum of partial norms": 1,
        "squared before the sum over cp": 2,
        "V2 keeps its own tokens part of vectors": 2,
        "one norm for the microbatch": 1,
        "loss over the microbatches targets": 1,
        "a rank divides by its own targets": 2,
        "records see each other in the model": 1,
    },
    whole: {"no clipping": 1, "bad samples kept": 1, "noise repeated across parameters": 1},
    noise: {
        "no noise": 1,
        "half the noise": 1,
        "noise not scaled by C": 1,
        "noise shared out over the ranks": 2,
        "all shards given the first ones noise": 2,
        "one key for all steps": 1,
        "not divided": 1,
    },
}


def _seen() -> list[Mutant]:
    found = []
    for room, faults in SEEN.items():
        for mutant in room.MUTANTS:
            if mutant.fault in faults:
                test = (PASSES[faults[mutant.fault]],)
                fault = f"selfcheck sees {mutant.fault}"
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
        "    if failed:\n        raise SystemExit(1)\n",
        "    if failed:\n        raise SystemExit(0)\n",
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
