"""Faults of precision, padding and bad samples: rows 13, 18, 22 and 26."""

from tests.hazards.mutants.clipping import CLIP, HERE, ONE, SUM
from tests.hazards.mutants.table import Mutant

POISONED = f"{HERE}test_row22_a_poisoned_sample_contributes_exactly_zero"

MUTANTS = [
    Mutant(
        13,
        "a sum in bf16",
        SUM,
        "dtype=self._summation.dtype, device=device)",
        "dtype=torch.bfloat16, device=device)",
        (f"{HERE}test_row13_hundreds_of_small_adds[grad_sample]",),
    ),
    Mutant(
        13,
        "adds rounded to bf16",
        CLIP,
        "    _add_scaled_(accumulator, gradient, factor, rejected)\n",
        "    _add_scaled_(accumulator, gradient, factor, rejected)\n"
        "    accumulator.copy_(accumulator.bfloat16())\n",
        (f"{ONE}test_row13_a_thousand_small_adds_match_fp64",),
        quick=True,
    ),
    Mutant(
        13,
        "gradients reduced in bf16",
        "models/llama3/parallelize.py",
        "reduce_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_reduce]",
        "reduce_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_param]",
        (f"{HERE}test_row13_hundreds_of_small_adds[microbatch]",),
    ),
    Mutant(
        13,
        "clipped to C exactly",
        CLIP,
        "_SAFETY = 1 - 1e-5\n",
        "_SAFETY = 1.0\n",
        (f"{HERE}test_row13_clipped_norm_never_exceeds_C",),
        quick=True,
    ),
    Mutant(
        13,
        "norms in bf16",
        CLIP,
        "    rows = gradient[..., :in_rows].unflatten(-1, (-1, _ROW))\n",
        "    gradient = gradient.bfloat16().float()\n"
        "    rows = gradient[..., :in_rows].unflatten(-1, (-1, _ROW))\n",
        (f"{ONE}test_squared_norms_are_those_of_fp64_rows",),
        quick=True,
    ),
    Mutant(
        13,
        "one fp32 norm of a large tensor",
        CLIP,
        "    in_rows = gradient.shape[-1] // _ROW * _ROW\n",
        "    in_rows = 0\n",
        (f"{HERE}test_row13_norms_of_large_tensors",),
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
        13,
        "noise in bf16",
        "privacy/noise.py",
        "values_here, alpha=std)",
        "values_here.bfloat16().float(), alpha=std)",
        (
            "privacy/test_noise.py::"
            "test_cpu_noise_is_numpys_philox_at_the_documented_key_and_counter",
        ),
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
        18,
        "padding is valid to the trainer",
        "data/feed.py",
        "        valid = drawn >= 0\n",
        "        valid = drawn >= -1\n",
        ("data/test_feed.py::test_padding_is_that_of_a_draw_that_leaves_a_rank_nothing",),
        quick=True,
    ),
    Mutant(
        22,
        "bad norms not rejected",
        CLIP,
        "~(torch.isfinite(squared_norm_B) & valid_B & is_fine_B)",
        "~valid_B",
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
        "        clipped = self.clip(self.squared_norms(shards), valid_B)\n",
        "        fine_B = torch.stack([s.flatten(1).isfinite().all(1) for s in shards]).all(0)\n"
        "        square_B = self.squared_norms([s.nan_to_num(0.0, 0.0, 0.0) for s in shards])\n"
        "        clipped = self.clip(square_B, valid_B & fine_B)\n",
        (
            "gradients/test_clipped_sum.py::"
            "test_row22_a_sample_that_one_rank_sees_to_be_bad_is_rejected_by_all",
        ),
    ),
    Mutant(
        22,
        "an exception depends on it",
        CLIP,
        "    norm_B = squared_norm_B.sqrt()\n",
        "    norm_B = squared_norm_B.sqrt()\n    assert norm_B.isfinite().all()\n",
        (f"{ONE}test_row18_and_22_padding_and_bad_norms_are_rejected",),
        quick=True,
    ),
    Mutant(
        22,
        "a bad sample poisons its microbatch",
        SUM,
        "bundle_DN, shard_DN, factor_B[sample], rejected_B[sample]",
        "bundle_DN, shard_DN, factor_B[sample], rejected_B.any()",
        (f"{POISONED}[(1, 1, 1)-nan-V2]",),
    ),
    Mutant(
        22,
        "a text without tokens stops the run",
        "data/samples/tokenizer.py",
        'isinstance(error, Exception) or type(error).__name__ == "PanicException"',
        'type(error).__name__ == "PanicException"',
        (
            "data/samples/test_tokenizer.py::test_a_text_that_it_has_no_tokens_for_is_none[WordLevel]",
        ),
        quick=True,
    ),
    Mutant(
        26,
        "a second clip accepted",
        "config/conflicts.py",
        "config.training.max_norm != 0",
        "config.training.max_norm < 0",
        (f"{HERE}test_row26_max_norm_is_refused",),
        quick=True,
    ),
    Mutant(
        26,
        "a second clip before the noise",
        "optimizer.py",
        "            gradient = clipped_sum[name]\n",
        "            gradient = clipped_sum[name].clamp_(-1e-3, 1e-3)\n",
        ("hazards/test_noise.py::test_row14_the_divisor_is_the_expected_batch[(1, 1, 2)-1]",),
    ),
    Mutant(
        13,
        "factors that fp32 rounds coarsely",
        "privacy/clipping.py",
        "scale_B >= torch.finfo(torch.float32).tiny",
        "scale_B >= 0",
        ("privacy/test_clipping.py::test_a_factor_that_fp32_rounds_coarsely_is_no_factor",),
        quick=True,
    ),
]
