"""Faults of lineage: segments of a run, initial weights and what they spent; rows 31, 45, 46."""

from tests.hazards.mutants.table import Mutant

LEDGER_TEST = "test_ledger.py::"
LEDGERS = "hazards/test_ledgers.py::"

LINEAGE, ACCOUNT = "ledger/lineage.py", "ledger/account.py"
INITIAL = "ledger/initial.py"

MUTANTS = [
    Mutant(
        46,
        "finished segments forgotten",
        LINEAGE,
        "        return [*self.finished, Segment(self.settings, current)]\n",
        "        return [Segment(self.settings, total)]\n",
        (f"{LEDGER_TEST}test_a_segment_starts_where_the_settings_change",),
        quick=True,
    ),
    Mutant(
        46,
        "earlier segments dropped by a new one",
        LINEAGE,
        "        self.finished = [segment for segment in loaded.segments() if segment.steps > 0]\n",
        "        self.finished = loaded.segments()[-1:]\n",
        (f"{LEDGERS}test_row31_a_third_segment_keeps_the_first",),
        quick=True,
    ),
    Mutant(
        31,
        "adaptive segments composed as planned",
        LINEAGE,
        "        if self.adaptive and self.budget is not None:\n",
        "        if self.adaptive and self.budget is None:\n",
        (f"{LEDGERS}test_row31_an_adaptive_lineage_spends_at_the_order_fixed_before_it",),
        quick=True,
    ),
    Mutant(
        31,
        "an adaptive lineage planned again after a resume",
        LINEAGE,
        "        self.adaptive = self.adaptive or earlier.adaptive\n",
        "",
        (f"{LEDGER_TEST}test_an_adaptive_segment_is_counted_by_the_filter_for_good",),
        quick=True,
    ),
    Mutant(
        31,
        "the budget fixed again after results",
        LINEAGE,
        "        self.budget, self.run = earlier.budget, earlier.run\n",
        "        self.budget, self.run = self.budget, earlier.run\n",
        (f"{LEDGER_TEST}test_an_adaptive_segment_is_counted_by_the_filter_for_good",),
        quick=True,
    ),
    Mutant(
        31,
        "any term may change with a segment",
        LINEAGE,
        "        self.settings.refuse_change_of_run(since=loaded.settings)\n",
        "",
        (f"{LEDGER_TEST}test_some_terms_no_segment_may_change",),
        quick=True,
    ),
    Mutant(
        45,
        "weights without a ledger accepted",
        INITIAL,
        "        if not config.privacy.initial_weights_public:\n",
        "        if not path:\n",
        (f"{LEDGERS}test_row45_weights_without_a_ledger_must_be_said_to_be_public",),
        quick=True,
    ),
    Mutant(
        45,
        "public weights not recorded as an assumption",
        INITIAL,
        "        ledger.add_caveat(PUBLIC)\n",
        "",
        (f"{LEDGERS}test_row45_weights_without_a_ledger_must_be_said_to_be_public",),
        quick=True,
    ),
    Mutant(
        45,
        "not private undone by an initial load",
        INITIAL,
        '        ledger.mark_not_private("the initial weights are not private")\n',
        "",
        (f"{LEDGERS}test_row45_not_private_sticks_to_initial_weights",),
        quick=True,
    ),
    Mutant(
        45,
        "an ancestor forgotten by an initial load",
        INITIAL,
        "    ledger.ancestors = list(dict.fromkeys([*earlier.ancestors, own]))\n",
        "    ledger.ancestors = list(dict.fromkeys([*earlier.ancestors]))\n",
        (f"{LEDGERS}test_row45_initial_weights_bring_all_that_they_spent",),
        quick=True,
    ),
    Mutant(
        45,
        "an ancestors ancestors forgotten",
        INITIAL,
        "    ledger.ancestors = list(dict.fromkeys([*earlier.ancestors, own]))\n",
        "    ledger.ancestors = [own]\n",
        (f"{LEDGERS}test_row45_initial_weights_bring_all_that_they_spent",),
        quick=True,
    ),
    Mutant(
        45,
        "an ancestors steps forgotten",
        LINEAGE,
        "        return [s.mechanism() for ancestor in self.ancestors for s in "
        "ancestor.segments]\n",
        "        return []\n",
        (f"{LEDGER_TEST}test_what_ancestors_spent_is_included",),
        quick=True,
    ),
    Mutant(
        45,
        "an ancestors steps forgotten as the run goes on",
        ACCOUNT,
        "        self._lineage = [*ledger.before(), *(",
        "        self._lineage = [*(",
        (f"{LEDGER_TEST}test_what_ancestors_spent_is_included",),
        quick=True,
    ),
]
