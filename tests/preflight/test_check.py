"""The model's folder, which a run that resumes needs as much as its first start."""

import contextlib

import pytest

from tests import build
from torchtitan_dp.checkpoint.start import own_checkpoint
from torchtitan_dp.models import hugging_face
from torchtitan_dp.train import check as module
from torchtitan_dp.train.check import check_names

FP32 = "--training.mixed_precision_param=float32"
LONG = r"training.seq_len = .*raise parallelism\.context_parallel_degree"


def test_a_run_that_resumes_needs_its_models_folder(tmp_path):
    """Without it the flavor's shape would count, and the checkpoint seem to be of another model."""
    config = build.config("--model.hf_assets_path=gone")
    with pytest.raises(ValueError, match=r"^model\.hf_assets_path = 'gone': no such folder; name"):
        check_names(config, own_checkpoint(str(tmp_path), 10))


@pytest.mark.parametrize(
    ("check", "flavor", "options", "cp", "accelerator", "refused"),
    [
        # A norm's values, of 8B's 4,096 a token: CUDA's kernel counts 2^32.
        ("check_norms", "8B", (f"--training.seq_len={2**20}",), 1, True, ""),
        ("check_norms", "8B", (f"--training.seq_len={2**20 + 2}",), 1, True, LONG),
        ("check_norms", "8B", (f"--training.seq_len={2**21}",), 1, False, ""),  # LeanRMSNorm
        ("check_norms", "8B", (f"--training.seq_len={2**21}",), 2, True, ""),
        # Grouped queries on a ring in fp32: no kernel has them.
        ("check_attention", "1B", (FP32,), 2, True, "= 'float32': .*set it to 'bfloat16'"),
        ("check_attention", "1B", (FP32,), 2, False, ""),
        ("check_attention", "1B", (FP32,), 1, True, ""),
        ("check_attention", "1B", ("--training.mixed_precision_param=bfloat16",), 2, True, ""),
        ("check_attention", "debug", (FP32,), 2, True, ""),  # every head has keys of its own
    ],
)
def test_what_cudas_kernels_cannot_compute_is_refused(
    monkeypatch, check, flavor, options, cp, accelerator, refused
):
    monkeypatch.setattr(module, "has_accelerator", lambda: accelerator)
    config = build.config(*options, degrees=(1, 1, cp))
    ends = pytest.raises(ValueError, match=rf"^[^\n]*{refused}[^\n]*\Z")
    with ends if refused else contextlib.nullcontext():
        getattr(module, check)(config, hugging_face.flavor(flavor))
