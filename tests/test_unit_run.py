"""A run whose unit is a user with several records: two ranks, one account, the same choices. This
file is also the program that torchrun starts: training, with the samples written down."""

import hashlib
import itertools
import json
import os
import sys
from pathlib import Path

import pytest

import torchtitan_dp.plan.__main__ as plan
from tests.processes.runs import arguments, privacy, train

pytestmark = pytest.mark.smoke  # the one whole run of `run_tests.sh` without arguments

USERS, STEPS = 6, 3
NOTES = 40  # of each user


def main(argv):
    """Training; of each microbatch a hash goes to a line of $SAMPLES_<rank>."""
    from torchtitan_dp.data.batching import Feed
    from torchtitan_dp.train import trainer as train

    real = Feed.microbatches

    def spy(self, *args, **options):
        with open(f"{os.environ['SAMPLES']}_{os.environ['RANK']}", "a") as file:
            for microbatch in real(self, *args, **options):
                sample = microbatch.labels_BT.numpy().tobytes()
                file.write(hashlib.sha256(sample).hexdigest() + "\n")
                yield microbatch

    Feed.microbatches = spy  # type: ignore[method-assign]
    train.main(argv)


def write_notes(path: Path) -> Path:
    """Each record of a user is far longer than a sample, and one record is nobody's. No text
    occurs twice, so the words of a window identify its user, record and place."""
    lines = [
        {"patient": user, "note": " ".join(f"{user}.{i}.{k}" for k in range(200))}
        for i in range(NOTES)
        for user in range(USERS - 1)
    ]
    lines.append({"patient": None, "note": "whose?"})
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("units")
    train(
        arguments(
            place / "out",
            write_notes(place / "notes.jsonl"),
            *("--training.dataset=jsonl", "--data.text_field=note", "--data.unit_field=patient"),
            *("--data.unit_sampling=random", "--data.long_records=window"),
            f"--training.global_batch_size={USERS}",  # all units at every step
            f"--training.steps={STEPS}",
            "--checkpoint.no-enable",
            "--comm.train_timeout_seconds=1000",  # a busy machine is slow
        ),
        log=place / "log",
        program=(__file__,),
        env={"SAMPLES": str(place / "samples")},
    )
    return place


def test_privacy_json_tells_the_unit_and_its_rate(place):
    spent = privacy(place / "out")
    assert spent["private"] is True
    assert spent["steps"] == STEPS
    assert spent["privacy_unit"] == "unit of data.unit_field 'patient'"
    assert spent["neighbouring_relation"] == "zero_out"
    assert spent["sample_rate"] == 1  # batch / units, not / records
    assert "unit: one unit of data.unit_field 'patient'" in (place / "log").read_text()


def test_ranks_of_a_cp_group_take_the_same_windows_and_each_step_others(place):
    first, second = ((place / f"samples_{rank}").read_text().split() for rank in (0, 1))
    assert first == second
    assert len(first) == STEPS * USERS
    steps = [first[i : i + USERS] for i in range(0, len(first), USERS)]
    assert all(len(set(step)) == USERS for step in steps)  # the last one is the empty unit
    # The unit without a name has the same empty sample each time. A user's window comes again by
    # chance in 1 of 28,000 cases, so two of the five users' in one of the three pairs of steps with
    # 4e-8. Choices that do not change from step to step have all 6 in common.
    for one, other in itertools.combinations(steps, 2):
        assert len(set(one) & set(other)) < 3


def test_another_unit_is_refused(place, monkeypatch, capsys):
    """In the same folder: what was spent is told for the one unit only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    command = arguments(place / "out", place / "notes.jsonl", "--training.dataset=jsonl")
    with pytest.raises(SystemExit) as stop:
        plan.main([*command, "--data.text_field=note", "--world_size=2", "--no_memory"])
    assert stop.value.code == 2
    assert "data.unit_field" in capsys.readouterr().err


if __name__ == "__main__":
    main(sys.argv[1:])
