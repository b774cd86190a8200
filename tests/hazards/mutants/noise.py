"""Faults of noise and the update: rows 8 to 10, 12, 14 and 49."""

from tests.hazards.mutants.table import Mutant

HERE = "hazards/test_noise.py::"
KEYS_TEST = "privacy/test_keys.py::"
ONE = "privacy/test_noise.py::"
TRAINER = "hazards/test_trainer.py::"
VARIANCE = f"{HERE}test_row08_variance_is_sigma_C_over_batch"

NOISE = "privacy/noise.py"
KEYS = "privacy/keys.py"
OPTIMIZER = "optimizer.py"
SUM = "gradients/clipped_sum.py"

MUTANTS = [
    Mutant(
        49,
        "the trainer adds noise of another kind",
        "gradients/methods.py",
        "            secure_noise=self.secure_noise,\n",
        "",
        (f"{TRAINER}test_row49_the_trainer_adds_noise_as_configured[True]",),
        quick=True,
    ),
    Mutant(
        8,
        "noise shared out over the ranks",
        OPTIMIZER,
        "        self._noise_std = noise_multiplier * max_grad_norm\n",
        "        self._noise_std = noise_multiplier * max_grad_norm\n"
        "        self._noise_std /= __import__('torch').distributed.get_world_size() ** 0.5\n",
        (f"{VARIANCE}[(1, 1, 2)-0]",),
    ),
    Mutant(
        8,
        "half the noise",
        NOISE,
        "add_(values[drawn], alpha=std)",
        "add_(values[drawn], alpha=std / 2)",
        (f"{ONE}test_std_scales_the_variance_and_the_gradient_stays",),
        quick=True,
    ),
    Mutant(
        9,
        "all shards given the first ones noise",
        OPTIMIZER,
        "std, start = self._noise_std, self._starts[name]\n",
        "std, start = self._noise_std, 0\n",
        (f"{HERE}test_row09_no_run_of_noise_occurs_twice",),
    ),
    Mutant(
        9,
        "all parameters given one noise",
        NOISE,
        'f"{generator}/{name}".encode()',
        'f"{generator}".encode()',
        (f"{ONE}test_no_run_of_four_values_occurs_twice[philox]",),
        quick=True,
    ),
    Mutant(
        9,
        "one key for all steps",
        KEYS,
        'hmac.digest(self.__key, step.to_bytes(8, "big"), "sha256")',
        'hmac.digest(self.__key, b"", "sha256")',
        (f"{KEYS_TEST}test_labels_steps_and_roots_give_distinct_keys",),
        quick=True,
    ),
    Mutant(
        10,
        "replicas keep their own sums",
        SUM,
        "            dist.all_reduce(chunk_N, group=self.groups.dp_replicate)\n",
        "            pass\n",
        (f"{HERE}test_row10_replicas_stay_identical",),
    ),
    Mutant(
        10,
        "replicas draw their own noise",
        OPTIMIZER,
        "self._add_noise_(gradient, keys, name)",
        "self._add_noise_(gradient, [(keys[0][0][1:] + "
        "bytes([__import__('torch').distributed.get_rank()]), 1.0)], name)",
        (f"{HERE}test_row10_replicas_stay_identical",),
    ),
    Mutant(
        12,
        "noise starts at the row not the value",
        OPTIMIZER,
        "offset[0] * math.prod(parameter.shape[1:])",
        "offset[0]",
        (f"{HERE}test_row12_noise_is_bit_identical_on_every_mesh",),
    ),
    Mutant(
        14,
        "divided by what was drawn",
        "train.py",
        "self.dp_optimizer.step(self.clipped_sum.take(), ",
        "self.dp_optimizer.step({n: g / max(len(draw), 1) for n, g in "
        "self.clipped_sum.take().items()}, ",
        (f"{TRAINER}test_row14_the_optimizer_is_given_the_clipped_sum_itself",),
        quick=True,
    ),
]
