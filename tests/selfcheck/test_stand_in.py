"""The whole selfcheck with CUDA's kernels, compiled, in the place of the CPU's: `stand_in`."""

import json
import sys

import pytest
import torch._dynamo

from tests.processes.runs import ROOT, Run
from torchtitan_dp.privacy.kernels import LAYOUTS

PROGRAM = (str(ROOT / "tests" / "selfcheck" / "stand_in.py"),)
FUNCTIONS = {"_add_scaled", "_add_normal", "threefry_normal_sum", "_by_comparison"}


@pytest.mark.thorough_cases("2", "4")
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_check_passes_and_no_function_has_too_many_graphs(ranks, tmp_path):
    """On four ranks dynamo's default limit of 8 graphs refused `_add_scaled` a ninth."""
    counts = tmp_path / "counts.json"
    env = {"STAND_IN_COUNTS": str(counts)}
    run = Run([], world_size=ranks, program=PROGRAM, env=env, log=tmp_path / "log", real=True)
    output = run.finish()
    assert "FAILED" not in output
    (passed,) = [line for line in output.splitlines() if line.endswith("passed")]
    of = passed.split("selfcheck: ")[1].split()
    assert of[0] == of[2]
    graphs = json.loads(counts.read_text())
    print(f"{ranks} ranks: {passed}; graphs: {graphs}", file=sys.stderr)
    assert set(graphs) == FUNCTIONS
    assert max(graphs.values()) < torch._dynamo.config.recompile_limit < LAYOUTS
