"""Faults of the exact sum, and of what is said of the fp32 one: row 49."""

from tests.hazards.mutants.clipping import SUM
from tests.hazards.mutants.table import Mutant

FIXED = "privacy/fixed_point.py"
SUMMATION = "privacy/summation.py"
STEP = "gradients/step.py"

POINT = "privacy/test_fixed_point.py::test_row49_"
MOVED = "privacy/test_summation.py::test_row49_"
RANKS = "gradients/test_exact_sum.py::test_row49_"
TRAINER = "hazards/test_trainer.py::test_row49_the_trainer_sums_and_adds_noise_as_configured[True]"
GAME = (
    "hazards/test_audit.py::test_row35_and_49_flags_what_is_summed_and_noised_as_configured"
    "[half the noise in units-norm_C-300-summed1]"
)

MUTANTS = [
    Mutant(
        49,
        "an exact sum in fp32",
        FIXED,
        "        total_n.add_(units_n.copy_(scaled_n))\n",
        "        total_n.copy_(total_n.float().add_(scaled_n.float()))\n",
        (f"{MOVED}in_fixed_point_no_record_moves_the_sum_by_more_than_C[0.0009765625]",),
        quick=True,
    ),
    Mutant(
        49,
        "a unit too coarse for the room",
        FIXED,
        "UNIT_BITS = 40\n",
        "UNIT_BITS = 30\n",
        (f"{POINT}the_unit_is_a_public_power_of_two_with_room_on_both_sides[1.0]",),
        quick=True,
    ),
    Mutant(
        49,
        "a unit too fine for int64",
        FIXED,
        "UNIT_BITS = 40\n",
        "UNIT_BITS = 43\n",
        (f"{POINT}the_unit_is_a_public_power_of_two_with_room_on_both_sides[1.0]",),
        quick=True,
    ),
    Mutant(
        49,
        "a unit above that of C",
        FIXED,
        "math.frexp(max_grad_norm)[1] - 1 - UNIT_BITS",
        "math.frexp(max_grad_norm)[1] - UNIT_BITS",
        (f"{POINT}the_unit_is_a_public_power_of_two_with_room_on_both_sides[1.0]",),
        quick=True,
    ),
    Mutant(
        49,
        "the product rounded to fp32",
        FIXED,
        "scaled_n.copy_(gradient_n).masked_fill_(rejected, 0.0).mul_(scale)",
        "scaled_n.copy_((gradient_n * scale.float()).masked_fill_(rejected, 0.0))",
        (f"{POINT}a_sample_is_rounded_once_to_the_nearest_unit",),
        quick=True,
    ),
    Mutant(
        49,
        "rounded toward zero",
        FIXED,
        "masked_fill_(rejected, 0.0).mul_(scale).round_()",
        "masked_fill_(rejected, 0.0).mul_(scale).trunc_()",
        (f"{POINT}a_sample_is_rounded_once_to_the_nearest_unit",),
        quick=True,
    ),
    Mutant(
        49,
        "what is rejected is converted",
        FIXED,
        "scaled_n.copy_(gradient_n).masked_fill_(rejected, 0.0)",
        "scaled_n.copy_(gradient_n)",
        ("privacy/test_fixed_point.py::test_row22_what_is_rejected_leaves_no_trace[nan]",),
        quick=True,
    ),
    Mutant(
        49,
        "other devices round the product to fp32",
        FIXED,
        "masked_fill(rejected, 0.0).double().mul_(scale)",
        "masked_fill(rejected, 0.0).mul_(scale.float()).double()",
        (f"{POINT}every_device_adds_the_same_integers[0.5]",),
        quick=True,
    ),
    Mutant(
        49,
        "other devices convert what is rejected",
        FIXED,
        "gradient.masked_fill(rejected, 0.0).double()",
        "gradient.double()",
        (f"{POINT}every_device_adds_the_same_integers[nan]",),
        quick=True,
    ),
    Mutant(
        49,
        "noise not rounded to units",
        FIXED,
        "noise.mul_(scale).round_()",
        "noise.mul_(scale / 2**20).round_().mul_(2**20)",
        (f"{POINT}noise_is_the_secure_draws_rounded_to_units[1e-12-0]",),
        quick=True,
    ),
    Mutant(
        49,
        "noise added in fp64",
        FIXED,
        "        part.add_(noise.mul_(scale).round_().to(torch.int64))\n",
        "        part.copy_(noise.mul_(scale).round_().add_(part.double()))\n",
        (f"{POINT}the_sum_and_its_noise_add_up_as_integers[1.0]",),
        quick=True,
    ),
    Mutant(
        49,
        "half the noise in units",
        FIXED,
        "std / math.sqrt(DRAWS) / unit",
        "std / DRAWS / unit",
        (f"{POINT}noise_is_the_secure_draws_rounded_to_units[0.7-0]",),
        quick=True,
    ),
    Mutant(
        49,
        "no grid after the noise",
        FIXED,
        "    step = grid(std) if std > 0 else unit\n",
        "    step = unit\n",
        (
            "privacy/test_fixed_point.py::"
            "test_what_comes_out_is_on_the_grid_in_the_memory_of_what_went_in[1.0-50]",
        ),
        quick=True,
    ),
    Mutant(
        49,
        "results written over what is not read yet",
        FIXED,
        "    for start in range(0, flat.numel(), _CHUNK):\n"
        "        here = slice(start, start + _CHUNK)\n"
        "        out[here]",
        "    for start in reversed(range(0, flat.numel(), _CHUNK)):\n"
        "        here = slice(start, start + _CHUNK)\n"
        "        out[here]",
        (
            "privacy/test_fixed_point.py::"
            "test_what_comes_out_is_on_the_grid_in_the_memory_of_what_went_in[1.0-50]",
        ),
        quick=True,
    ),
    Mutant(
        49,
        "ranks reduced in fp32",
        SUM,
        "        chunk_N = self._whole[0]\n",
        "        chunk_N = self._whole[0].float().to(self._whole.dtype)\n",
        (f"{RANKS}whichever_rank_a_sample_is_dealt_to_no_bit_changes[(2, 1, 1)]",),
    ),
    Mutant(
        49,
        "exact sum without secure noise accepted",
        "config/checks.py",
        "    if not privacy.secure_noise:\n",
        "    if False:\n",
        ("config/test_load.py::test_bad_input[an exact sum with fp32 noise]",),
        quick=True,
    ),
    Mutant(
        49,
        "the option not read",
        STEP,
        "    if not privacy.exact_sum:\n",
        "    if True:\n",
        (TRAINER,),
        quick=True,
    ),
    Mutant(
        49,
        "the trainer adds noise of another kind",
        STEP,
        "            summation=self.summation,\n",
        "",
        (TRAINER,),
        quick=True,
    ),
    Mutant(
        49,
        "the game plays with fp32 whatever the run does",
        "audit/game.py",
        "build_step(privacy, ",
        "build_step(Privacy(gradient_method=privacy.gradient_method), ",
        (GAME,),
    ),
    Mutant(
        49,
        "the plan counts four bytes",
        "plan/fake_step.py",
        "                config.privacy,\n",
        "                type(config.privacy)(gradient_method=config.privacy.gradient_method),\n",
        (
            "plan/test_memory.py::"
            "test_row49_an_exact_sum_takes_eight_bytes_a_value[--training.local_batch_size=1]",
        ),
    ),
    Mutant(
        49,
        "what fp32 adds counted once a sample",
        SUMMATION,
        "    local = max(samples * (samples + 1) - 2, 0)\n",
        "    local = 2 * samples\n",
        (f"{MOVED}in_fp32_a_tiny_record_moves_the_sum_far[12]",),
        quick=True,
    ),
    Mutant(
        49,
        "ranks not counted in what fp32 adds",
        SUMMATION,
        "(local + across)",
        "local",
        (f"{MOVED}the_bound_for_fp32_is_that_of_its_additions_one_by_one",),
        quick=True,
    ),
]
