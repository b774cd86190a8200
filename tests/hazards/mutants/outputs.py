"""Faults of what is told, saved and decided: rows 24, 25, 33, 34, 44 and 45."""

from tests.hazards.mutants.table import Mutant

ONE = "privacy/test_accounting.py::"
LEDGER_TEST = "ledger/test_ledger.py::"
OUTPUTS = "hazards/test_outputs.py::"
TRAINER = "hazards/test_trainer.py::"
LEDGERS = "hazards/test_ledgers.py::"
PLANS = "plan/test_plan.py::"

LINEAGE = "ledger/lineage.py"

MUTANTS = [
    Mutant(
        24,
        "private tags without their label",
        "metrics.py",
        "k if k in PUBLIC else _PREFIX + k: v",
        "k: v",
        (f"{OUTPUTS}test_row24_only_what_is_public_has_a_plain_tag",),
        quick=True,
    ),
    Mutant(
        24,
        "the norm said to be public",
        "metrics.py",
        'PUBLIC = frozenset({"lr", ',
        'PUBLIC = frozenset({"norm_p50", "lr", ',
        (f"{OUTPUTS}test_row24_only_what_is_public_has_a_plain_tag",),
        quick=True,
    ),
    Mutant(
        24,
        "the loss before the label",
        "metrics.py",
        "{color.blue}epsilon: ",
        "{color.blue}loss: {statistics['loss']:.4f}  epsilon: ",
        (f"{OUTPUTS}test_row24_the_console_line_labels_what_is_not",),
        quick=True,
    ),
    Mutant(
        24,
        "drawn records counted in privacy json",
        "ledger/schema.py",
        "    return content\n",
        '    return {**content, "tokens_seen": 1}\n',
        (f"{OUTPUTS}test_row23_and_24_privacy_json_holds_the_contract_alone",),
        quick=True,
    ),
    Mutant(
        24,
        "the datas fingerprint published",
        "ledger/files.py",
        "os.path.join(folder, PRIVACY_FILE), to_bytes(content))",
        "os.path.join(folder, PRIVACY_FILE), "
        'to_bytes({**content, "records": read_fingerprint(folder)}))',
        ("ledger/test_ledger.py::test_fingerprint_is_not_published",),
        quick=True,
    ),
    Mutant(
        25,
        "a rule on the loss in the configuration",
        "config/schema.py",
        '    text_field: str = "text"\n',
        '    loss_threshold: float = 0.0\n\n    text_field: str = "text"\n',
        (
            f"{PLANS}test_hazard_25_every_config_plans_and_has_no_rule_on_private_values"
            "[llama3_debug]",
        ),
    ),
    Mutant(
        25,
        "a bad loss ends the step",
        "train.py",
        "            clip = self.gradients.accumulate_clipped(",
        "            if not loss_B.isfinite().all():\n"
        "                return\n"
        "            clip = self.gradients.accumulate_clipped(",
        (f"{TRAINER}test_row22_and_25_a_bad_loss_changes_no_course",),
        quick=True,
    ),
    Mutant(
        33,
        "a buffer learns from the data",
        "models/llama3/model.py",
        "        h_BTD = self.tok_embeddings(tokens)\n",
        "        h_BTD = self.tok_embeddings(tokens)\n"
        "        self.freqs_cis.data = self.freqs_cis * (1 + 1e-6 * h_BTD.detach().abs().mean())\n",
        (f"{OUTPUTS}test_row33_a_microbatch_changes_no_buffer",),
    ),
    Mutant(
        34,
        "the tokenizer trained on the records",
        "data/samples/tokenizer.py",
        "        backend.no_padding()\n",
        "        backend.no_padding()\n        backend.train_from_iterator([])\n",
        (f"{OUTPUTS}test_row34_no_code_of_ours_trains_a_tokenizer",),
        quick=True,
    ),
    Mutant(
        34,
        "the held out loss without its label",
        "validate.py",
        "not private: held-out loss:",
        "held-out loss:",
        (f"{OUTPUTS}test_row34_the_held_out_loss_is_labelled",),
        quick=True,
    ),
    Mutant(
        44,
        "drawn indices in the checkpoint",
        "train.py",
        '            "step": self.step,\n',
        '            "step": self.step,\n            "draw": [],\n',
        (f"{LEDGERS}test_row44_a_checkpoint_holds_expectations_and_the_ledger",),
        quick=True,
    ),
    Mutant(
        44,
        "realised tokens in the checkpoint",
        "train.py",
        '"ntokens_seen": self.step * batch * windows * seq_len,',
        '"ntokens_seen": self.ntokens_seen,',
        (f"{LEDGERS}test_row44_a_checkpoint_holds_expectations_and_the_ledger",),
        quick=True,
    ),
    Mutant(
        44,
        "saved in the middle of a step",
        "train.py",
        "        if self.clipped_sum.accumulating:\n",
        "        if not self.clipped_sum:\n",
        (f"{LEDGERS}test_row44_a_checkpoint_holds_expectations_and_the_ledger",),
        quick=True,
    ),
    Mutant(
        44,
        "a sum that never says it accumulates",
        "gradients/clipped_sum.py",
        "        self.accumulating = True\n        for bundle_DN",
        "        for bundle_DN",
        (f"{LEDGERS}test_row44_a_sum_says_that_it_is_accumulating",),
    ),
    Mutant(
        44,
        "the loader saves its draws",
        "data/batching.py",
        "    def state_dict(self) -> dict[str, Any]:\n        return {}\n",
        "    def state_dict(self) -> dict[str, Any]:\n"
        '        return {"units": self.units.tolist()}\n',
        (f"{LEDGERS}test_row44_a_loader_saves_nothing_of_its_draws",),
        quick=True,
    ),
    Mutant(
        44,
        "an un-noised gradient in the checkpoint",
        "train.py",
        '            "step": self.step,\n',
        '            "step": self.step,\n'
        '            "sum": {n: g.clone() for n, g in self.clipped_sum.take().items()},\n',
        (f"{LEDGERS}test_row44_a_checkpoint_holds_expectations_and_the_ledger",),
        quick=True,
    ),
    Mutant(
        45,
        "not private undone by a private successor",
        LINEAGE,
        "        self.private = self.private and earlier.private\n",
        "",
        (f"{LEDGER_TEST}test_caveats_of_earlier_weights_are_inherited",),
        quick=True,
    ),
    Mutant(
        45,
        "not private undone by loading",
        LINEAGE,
        "        self.inherit(loaded)\n",
        "",
        (f"{LEDGERS}test_row45_not_private_is_loaded_with_the_weights",),
        quick=True,
    ),
    Mutant(
        45,
        "not private undone by a new start",
        "ledger/terms.py",
        "    before = resumed or _lost(account)\n",
        "    account = account and dataclasses.replace(account, private=True, caveats=[])\n"
        "    before = resumed or _lost(account)\n",
        (f"{LEDGERS}test_row15_and_31_and_45_a_start_goes_on_from_the_folders_ledger",),
    ),
    Mutant(
        45,
        "weights resumed without their ledger",
        "train.py",
        "            if not self._ledger_loaded:\n",
        "            if not self.model_parts:\n",
        (f"{LEDGERS}test_row45_weights_loaded_without_their_ledger_are_not_trained_on",),
        quick=True,
    ),
    Mutant(
        45,
        "weights resumed without their optimizer",
        "train.py",
        "            self.dp_optimizer.require_steps(self.step)\n",
        "",
        (f"{LEDGERS}test_row45_weights_loaded_without_their_optimizer_are_not_trained_on",),
        quick=True,
    ),
    Mutant(
        24,
        "counts of lines without a label",
        "data/console.py",
        'print(f"warning (not private): {text}"',
        'print(f"warning: {text}"',
        ("preflight/test_notices.py::test_counts_change_no_file_that_is_published",),
        quick=True,
    ),
]
