"""Faults of what is told, saved and decided: rows 24, 25, 33, 34, 44 and 45."""

from tests.hazards.mutants.table import Mutant

OUTPUTS = "hazards/test_outputs.py::"
TRAINER = "hazards/test_trainer.py::"
LEDGERS = "hazards/test_ledgers.py::"


MUTANTS = [
    Mutant(
        24,
        "private tags without their label",
        "watch/outlets.py",
        "    public = private and scalar is not None and scalar.public\n",
        "    public = private\n",
        (f"{OUTPUTS}test_row24_only_what_is_public_is_in_the_public_section",),
        quick=True,
    ),
    Mutant(
        24,
        "losses sent to wandb",
        "watch/outlets.py",
        'for n, value in scalars.items() if n.startswith(f"{PUBLISHABLE}/")}',
        "for n, value in scalars.items()}",
        ("watch/test_outlets.py::test_services_get_what_may_be_published",),
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
        "models/private.py",
        "        h_BTD = self.tok_embeddings(tokens)\n",
        "        h_BTD = self.tok_embeddings(tokens)\n"
        "        self.freqs_cis.data = self.freqs_cis * (1 + 1e-6 * h_BTD.detach().abs().mean())\n",
        (f"{OUTPUTS}test_row33_a_microbatch_changes_no_buffer",),
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
        "saved in the middle of a step",
        "train.py",
        "        if self.clipped_sum.accumulating:\n",
        "        if not self.clipped_sum:\n",
        (f"{LEDGERS}test_row44_a_checkpoint_holds_expectations_and_the_ledger",),
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
        "weights resumed without their ledger",
        "train.py",
        "            self.books.require_loaded()\n",
        "",
        (f"{LEDGERS}test_row45_weights_loaded_without_their_ledger_are_not_trained_on",),
        quick=True,
    ),
    Mutant(
        66,
        "an evaluation that is not in the log",
        "bookkeeping.py",
        "            self.log.begin_evaluation()\n",
        "",
        ("test_validate.py::test_row66_a_loss_is_in_the_log_before_its_noise_is_drawn",),
        quick=True,
    ),
    Mutant(
        66,
        "evaluations that a crash lost are not counted",
        "ledger/log.py",
        "losses, lost=sum(part.evaluations for part in lost)",
        "losses, lost=0",
        ("ledger/test_histories.py::test_row46_no_history_publishes_fewer_steps_than_were_begun",),
        quick=True,
    ),
    Mutant(
        66,
        "a held-out loss that is not a number counts twice",
        "privacy/published_loss.py",
        "np.nan_to_num(losses_N, nan=clip, posinf=clip, neginf=0.0).clip(0.0, clip)",
        "np.nan_to_num(losses_N, nan=2 * clip, posinf=clip, neginf=0.0)",
        (
            "privacy/test_published_loss.py::"
            "test_row66_a_unit_moves_the_mean_by_the_clip_over_n_at_most_whatever_its_loss_is",
        ),
        quick=True,
    ),
    Mutant(
        66,
        "the losses of an ancestor as its last mention has them",
        "ledger/spending.py",
        "max(found, known, key=lambda segment: segment.steps)",
        "found",
        ("ledger/test_heldout.py::test_an_ancestor_that_is_known_twice_counts_as_it_counts_most",),
        quick=True,
    ),
]
