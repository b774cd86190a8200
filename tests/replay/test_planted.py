"""Faults of the reviews' history, planted: a replay flags each of them without being shown where,
but for those that are equal on both sides: less noise, or a key that is used twice."""

import pytest

from tests.replay.case import Case, differences
from tests.replay.faults import FAULTS
from tests.replay.test_replay import CLOCK, HELD_OUT
from torchtitan_dp.release import __main__ as release

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

PLAIN = Case("plain", batch=11)
LOSSES = Case("losses", HELD_OUT)
CASES = {
    "lost_steps_are_counted_exactly": CLOCK,
    "a_rank_reads_other_records": Case("two readers", dp_shard=2, batch=11),
    "each_group_is_clipped_to_all_of_c": Case("groups", ("--privacy.clipping=per_layer",)),
    "a_published_loss_is_hardly_clipped": LOSSES,
}
"""The cases of faults that not every run could show."""

FLAG = {
    "an_empty_record_ends_the_run": "exit codes",  # row 47
    "a_rank_reads_other_records": "clipped sums",  # row 48
    "the_loss_stops_the_run": "steps",  # row 50
    "lost_steps_are_counted_exactly": "privacy.json",  # row 59
    "the_divisor_is_counted": "clipped sums",  # row 65
    "the_learning_rate_follows_the_loss": "learning rates",
    "each_group_is_clipped_to_all_of_c": "clipped sums",
    "privacy_json_counts_samples": "privacy.json",
    "a_loss_is_printed_without_its_label": "console",
    "a_collective_is_as_large_as_the_batch": "collectives",
    "a_published_loss_is_hardly_clipped": "held-out losses differ",
}
"""By fault, a word of one of the differences that were found."""


def test_every_fault_is_listed():
    assert FLAG.keys() == FAULTS.keys()


@pytest.mark.parametrize("fault", FLAG)
def test_a_planted_fault_is_flagged(fault, tmp_path):
    found = differences(CASES.get(fault, PLAIN), tmp_path, fault=fault)
    assert any(FLAG[fault] in difference for difference in found), found


def test_a_path_in_a_release_is_flagged(tmp_path, monkeypatch):
    real = release.model_card

    def with_path(terms, config, *args, **options):
        return real(terms, config, *args, **options) + str(config.training.dataset_path)

    monkeypatch.setattr(release, "model_card", with_path)
    found = differences(PLAIN, tmp_path)
    assert any("released/README.md" in difference for difference in found), found
