"""Whole runs with correlated noise: the noise that reaches the weights, and one band.

Every record but one is empty, and that one is clipped far below the noise, so that weights move by
noise alone, and `MomentumSGD` without momentum moves them by lr / sigma times what a step adds over
C: checkpoints have the noise of each step.
"""

import math

import numpy as np
import pytest
import torch

from tests.privacy.test_banded import matrix
from tests.processes.runs import arguments, privacy, train, weights, with_sigma, write_records
from torchtitan_dp.checkpoint.folder import verify

pytestmark = pytest.mark.slow

BANDS, STOP, STEPS, LR = 4, 5, 10, 0.125


def test_row62_and_63_the_noise_of_two_starts_has_the_covariance_of_two_chains(tmp_path):
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    for i in range(24):
        (data / f"{i}.txt").write_text("" if i else "a text")  # else there is nothing to learn
    command = arguments(
        out,
        data,
        *(*with_sigma(2.0), "--privacy.noise=banded", f"--privacy.bands={BANDS}"),
        *("--optimizer.name=MomentumSGD", "--optimizer.beta1=0", "--optimizer.weight_decay=0"),
        *(f"--optimizer.lr={LR}", "--lr_scheduler.min_lr_factor=1", "--checkpoint.interval=1"),
    )
    columns = []
    for steps in (STOP, STEPS):
        train([*command, f"--training.steps={steps}"], log=tmp_path / f"log{steps}")
        columns.append(privacy(out)["column"])
    column, kept = columns
    assert kept == column, "a resume, of a longer run, found another"
    assert len(set(column)) == BANDS
    after = [weights(out / "checkpoint" / f"step-{step}") for step in range(1, STEPS + 1)]
    flat = [torch.cat([w[name].flatten() for name in sorted(w)]).double() for w in after]
    noise = torch.stack(flat).diff(dim=0).numpy() / LR  # of steps 2, 3, …
    expected = np.zeros((STEPS, STEPS))
    for rows in (slice(0, STOP), slice(STOP, STEPS)):
        square = np.linalg.inv(matrix(column, rows.stop - rows.start))
        expected[rows, rows] = sum(c**2 for c in column) * square @ square.T
    expected = expected[1:, 1:]
    found = noise @ noise.T / noise.shape[1]
    variances = np.diag(expected)
    spread = np.sqrt((np.outer(variances, variances) + expected**2) / noise.shape[1])
    assert (np.abs(found - expected) < 5 * spread + 1e-4).all(), (found / expected, spread)
    assert verify(str(out)).faults == []
    (event,) = privacy(out)["dp_event"]["events"]
    assert event["count"] == math.ceil(STEPS / BANDS)
    assert event["event"]["sampling_probability"] == pytest.approx(BANDS * 3 / 24)


def test_one_band_is_independent_noise_bit_by_bit_over_a_whole_run(tmp_path):
    data, found = write_records(tmp_path / "data"), []
    for name, noise in (("a", []), ("b", ["--privacy.noise=banded", "--privacy.bands=1"])):
        out = tmp_path / name
        command = arguments(out, data, "--privacy.debug_seed=3", *noise)
        train(command, log=tmp_path / f"log_{name}", world_size=1)
        of_a_start = {"run", "config_hash"}
        spent = {key: value for key, value in privacy(out).items() if key not in of_a_start}
        log = (out / "steps_executed.log").read_text()
        found.append((weights(out / "checkpoint" / "step-4"), spent, log))
    (first, *others), (second, *others_too) = found
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)
    assert others == others_too
