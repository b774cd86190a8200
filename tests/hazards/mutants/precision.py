"""Faults of precision, padding and bad samples: rows 13, 18, 22 and 26."""

from tests.hazards.mutants.clipping import CLIP, HERE, ONE, SUM
from tests.hazards.mutants.table import Mutant

MUTANTS = [
    Mutant(
        13,
        "a sum in bf16",
        SUM,
        "dtype=torch.float32, device=device)",
        "dtype=torch.bfloat16, device=device)",
        (f"{HERE}test_row13_hundreds_of_small_adds[grad_sample]",),
    ),
    Mutant(
        13,
        "gradients reduced in bf16",
        "models/parallelize.py",
        "reduce_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_reduce]",
        "reduce_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_param]",
        (f"{HERE}test_row13_hundreds_of_small_adds[microbatch]",),
    ),
    Mutant(
        13,
        "norms of rows too long for fp32",
        CLIP,
        "_ROW = 256\n",
        "_ROW = 4096\n",
        (f"{ONE}test_row13_no_gradient_is_added_with_more_than_C[4096-vanilla]",),
        quick=True,
    ),
    Mutant(
        18,
        "padding is added",
        CLIP,
        "~(torch.isfinite(squared_norm_B) & valid_B & is_fine_B)",
        "~(torch.isfinite(squared_norm_B) & is_fine_B)",
        (f"{ONE}test_row18_and_22_padding_and_bad_norms_are_rejected",),
        quick=True,
    ),
    Mutant(
        22,
        "rejected by a factor of 0",
        CLIP,
        "            gradient = factor = gradient.new_zeros(())\n",
        "            factor = gradient.new_zeros(())\n",
        (f"{ONE}test_row22_what_is_rejected_leaves_no_trace",),
        quick=True,
    ),
    Mutant(
        22,
        "decided by each rank alone",
        SUM,
        "        clipped = self.policy.clip(self.squared_norms(shards), valid_B)\n",
        "        fine_B = torch.stack([s.flatten(1).isfinite().all(1) for s in shards]).all(0)\n"
        "        square_B = self.squared_norms([s.nan_to_num(0.0, 0.0, 0.0) for s in shards])\n"
        "        clipped = self.policy.clip(square_B, valid_B & fine_B)\n",
        (
            "gradients/test_clipped_sum.py::"
            "test_row22_a_sample_that_one_rank_sees_to_be_bad_is_rejected_by_all",
        ),
    ),
    Mutant(
        26,
        "a second clip before the noise",
        "optimizer.py",
        "            gradient = clipped_sum[name]\n",
        "            gradient = clipped_sum[name].clamp_(-1e-3, 1e-3)\n",
        ("hazards/test_noise.py::test_row14_the_divisor_is_the_expected_batch[(1, 1, 2)-1]",),
    ),
]
