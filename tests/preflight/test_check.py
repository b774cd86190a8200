"""The model's folder, which a run that resumes needs as much as its first start."""

import pytest

from tests import build
from torchtitan_dp.checkpoint.start import own_checkpoint
from torchtitan_dp.preflight.check import check_model


def test_a_run_that_resumes_needs_its_models_folder(tmp_path):
    """Without it the flavor's shape would count, and the checkpoint seem to be of another model."""
    config = build.config("--model.hf_assets_path=gone")
    with pytest.raises(ValueError, match=r"^model\.hf_assets_path = 'gone': no such folder; name"):
        check_model(config, own_checkpoint(str(tmp_path), 10))
