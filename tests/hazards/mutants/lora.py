"""Faults of what is trained and what is frozen, with adapters, and of the game: row 56."""

from tests.hazards.mutants.table import Mutant

HERE = "models/test_lora.py::"
GAME = "hazards/test_audit.py::test_row35_and_56_adapters_left_out_of_the_norm_are_flagged"
PLAYED = (
    "hazards/test_audit.py::test_row35_and_56_with_adapters_it_stays_under_the_claim"
    "[(1, 1, 1)-microbatch]"
)
HELD = f"{HERE}test_row56_the_first_update_is_held"
BY_HAND = f"{HERE}test_adapters_merged_by_hand_as_peft_does_give_the_same_logits"

MUTANTS = [
    Mutant(
        56,
        "adapters drawn from no seed",
        "models/lora.py",
        "nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)",
        "nn.init.kaiming_uniform_(whole, a=math.sqrt(5))",
        (f"{HERE}test_row56_adapters_are_drawn_alike_on_every_mesh[(2, 1, 1)]",),
    ),
    Mutant(
        56,
        "a norm trained along",
        "models/lora.py",
        "    model.requires_grad_(False)\n",
        "    model.requires_grad_(False)\n    model.norm.requires_grad_(True)\n",
        (f"{HERE}test_row56_what_is_frozen_is_not_paid_for_and_does_not_move[microbatch]",),
    ),
    Mutant(
        56,
        "adapters of a layer not counted in the norm",
        "gradients/clipped_sum.py",
        "torch.stack([squared_norm(s.flatten(1)) for s in shards])",
        "torch.stack([squared_norm(s.flatten(1)) for s in shards[:-2]])",
        (f"{GAME}[B-None]", f"{GAME}[A-None]"),
    ),
    Mutant(
        56,
        "the game plays without the run's adapters",
        "audit/__main__.py",
        "lora=lora_of(config),",
        "lora=lora_of(config) and None,",
        ("hazards/test_audit.py::test_row35_and_56_the_command_plays_with_the_runs_adapters",),
    ),
    Mutant(
        56,
        "factors A not counted in the norm",
        "gradients/clipped_sum.py",
        "torch.stack([squared_norm(s.flatten(1)) for s in shards])",
        "torch.stack([squared_norm(s.flatten(1)) for s in shards[1::2]])",
        (f"{GAME}[A-None]",),
    ),
    Mutant(
        56,
        "noise is named by kind of factor",
        "optimizer.py",
        "key=key, name=name, start",
        'key=key, name=name.partition(".lora_")[2] or name, start',
        (PLAYED,),
    ),
    Mutant(
        56,
        "noise is named by adapted layer",
        "optimizer.py",
        "key=key, name=name, start",
        'key=key, name=name.partition(".lora_")[0], start',
        (PLAYED,),
    ),
    Mutant(
        56,
        "no noise on factors A",
        "optimizer.py",
        "std=self._noise_std, key",
        'std=self._noise_std * (".lora_a." not in name), key',
        (PLAYED,),
    ),
    Mutant(
        56,
        "the game's layers do not grow with the mesh",
        "audit/game.py",
        "tokens, columns = max(tokens, rows), max(columns, rows)",
        "columns = max(columns, rows)",
        (
            "hazards/test_audit.py::"
            "test_row67_the_game_plays_with_estimates_on_any_mesh[32-hutchinson]",
        ),
    ),
    Mutant(
        56,
        "frozen weights given to AdamW",
        "models/lora.py",
        "    model.requires_grad_(False)\n",
        "",
        (f"{HERE}test_row56_what_is_frozen_is_not_paid_for_and_does_not_move[grad_sample]",),
    ),
    Mutant(
        56,
        "the first update is not looked at",
        "models/first_update.py",
        '        if not any(group["lr"] for group in optimizer.param_groups):\n',
        "        if optimizer.param_groups:\n",
        (f"{HELD}[trained along]", f"{HELD}[left out]"),
    ),
    Mutant(
        56,
        "no update is looked at in training",
        "train.py",
        "        FirstUpdate(model, inner, noised=settings.noise_multiplier > 0)\n",
        "        assert FirstUpdate and inner\n",
        ("models/test_lora_run.py::test_row56_a_run_whose_frozen_weights_move_ends[enable]",),
    ),
    Mutant(
        56,
        "frozen weights not looked at",
        "models/first_update.py",
        "            if moved and not is_adapter(name):\n",
        "            if moved and not name:\n",
        (f"{HELD}[trained along]", f"{HELD}[trained along without noise]"),
    ),
    Mutant(
        56,
        "adapters need not move",
        "models/first_update.py",
        "handed | self._noised",
        "handed & False",
        (f"{HELD}[left out]",),
    ),
    Mutant(
        56,
        "alpha over r left out of a merge",
        "models/lora.py",
        "a.float(), alpha=scaling)",
        "a.float())",
        (f"{HERE}test_merged_weights_give_the_same_logits",),
        quick=True,
    ),
    Mutant(
        56,
        "alpha not told",
        "models/adapter_export.py",
        '"lora_alpha": lora.alpha',
        '"lora_alpha": lora.rank',
        (BY_HAND,),
        quick=True,
    ),
    Mutant(
        56,
        "rows exported in our order",
        "models/adapter_export.py",
        "            whole = whole[order]\n",
        "            whole = whole.clone()\n",
        (BY_HAND,),
        quick=True,
    ),
]
