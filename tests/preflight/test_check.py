"""The model's folder, which a run that resumes needs as much as its first start."""

import pytest

from tests import build
from torchtitan_dp.checkpoint.start import own_checkpoint
from torchtitan_dp.models.llama3.model import FLAVORS
from torchtitan_dp.preflight import machine
from torchtitan_dp.preflight.check import check_model


def test_a_run_that_resumes_needs_its_models_folder(tmp_path):
    """Without it the flavor's shape would count, and the checkpoint seem to be of another model."""
    config = build.config("--model.hf_assets_path=gone")
    with pytest.raises(ValueError, match=r"^model\.hf_assets_path = 'gone': no such folder; name"):
        check_model(config, own_checkpoint(str(tmp_path), 10))


@pytest.mark.parametrize(
    ("tokens", "cp", "accelerator", "refused"),
    [
        (2**20, 1, True, False),  # 2^32 values, of 8B's 4,096 a token
        (2**20 + 2, 1, True, True),
        (2**21, 1, True, True),
        (2**21, 1, False, False),  # LeanRMSNorm
        (2**21, 2, True, False),
    ],
)
def test_more_values_than_cudas_norm_counts_are_refused(
    monkeypatch, tokens, cp, accelerator, refused
):
    monkeypatch.setattr(machine, "has_accelerator", lambda: accelerator)
    config = build.config(f"--training.seq_len={tokens}", degrees=(1, 1, cp))
    if not refused:
        machine.check_norms(config, FLAVORS["8B"])
        return
    with pytest.raises(ValueError, match=f"training.seq_len = {tokens}") as error:
        machine.check_norms(config, FLAVORS["8B"])
    assert "\n" not in str(error.value)
    assert "raise parallelism.context_parallel_degree" in str(error.value)
