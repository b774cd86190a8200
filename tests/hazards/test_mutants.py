"""Every hazard's fault, put into a copy of the package, makes the test fail that is there for it.

The default suite runs one mutant of each room, of those whose tests need one process. All of them:

    ./scripts/run_tests.sh -m mutants
"""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.hazards.mutants import (
    accounting,
    answers,
    banded,
    claims,
    clipping,
    clocks,
    crashes,
    ema,
    ghost,
    keys,
    learning,
    lineage,
    lora,
    noise,
    not_finite,
    other_records,
    outputs,
    parameters,
    per_layer,
    precision,
    randomized,
    same_records,
    sampling,
    selfcheck,
    streams,
    whole,
    windows,
)
from tests.hazards.mutants.runner import Runner, copy_tree, running
from tests.hazards.mutants.table import ROOT, Mutant, node_ids

ROWS = {*range(1, 71), 72, 73, 75, 76}
ROOMS = (
    clipping,
    ghost,
    per_layer,
    randomized,
    streams,
    precision,
    parameters,
    noise,
    banded,
    keys,
    sampling,
    same_records,
    other_records,
    answers,
    accounting,
    outputs,
    lineage,
    claims,
    clocks,
    whole,
    crashes,
    selfcheck,
    learning,
    windows,
    lora,
    ema,
    not_finite,
)
MUTANTS: list[Mutant] = [mutant for room in ROOMS for mutant in room.MUTANTS]
SAMPLE = [mutant for room in ROOMS for mutant in [m for m in room.MUTANTS if m.quick][:1]]


def test_every_row_has_a_mutant():
    assert {mutant.row for mutant in MUTANTS} == ROWS


def test_names_are_unique():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_the_texts_to_replace_occur_once_and_the_results_are_python():
    """Code that moved must take its mutants along."""
    wrong = []
    for mutant in MUTANTS:
        path = ROOT / "torchtitan_dp" / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            wrong.append(f"{mutant.name}: {text.count(mutant.old)} times {mutant.old!r} in {path}")
        compile(text.replace(mutant.old, mutant.new), f"{path}, {mutant.name}", "exec")
    assert wrong == []


def test_the_tests_exist():
    """By name, without collecting them all: the function is defined in the file."""
    for mutant in MUTANTS:
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / "tests" / file).read_text(), test


@pytest.fixture(scope="module")
def runner(tmp_path_factory) -> Iterator[Runner]:
    with running(tmp_path_factory.mktemp("mutants")) as started:
        yield started


def survivors(runner: Runner, mutants: list[Mutant]) -> list[str]:
    """Those that are not caught, and what their tests said."""
    found = []
    for mutant in mutants:
        outcome = runner.run(mutant, node_ids(mutant))
        print(
            f"{outcome.seconds:5.1f} s  {'caught' if outcome.caught else 'SURVIVED'}  {mutant.name}"
        )
        if not outcome.caught:
            found.append(f"{mutant.name}: {outcome}")
    return found


def without_a_fault(runner: Runner, mutants: list[Mutant]) -> None:
    """The same tests in the same surroundings pass: it is the fault that fails them."""
    tests = tuple(dict.fromkeys(test for mutant in mutants for test in node_ids(mutant)))
    outcome = runner.run(None, tests)
    print(f"{outcome.seconds:5.1f} s  {len(tests)} tests without a fault")
    assert outcome.passed, str(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", SAMPLE, ids=lambda mutant: mutant.name)
def test_a_quick_mutant_of_each_room_is_caught(runner, mutant):
    assert survivors(runner, [mutant]) == []


@pytest.mark.mutants
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(runner, mutant):
    assert survivors(runner, [mutant]) == []


@pytest.mark.mutants
@pytest.mark.timeout(1500)
def test_without_a_fault_all_pass(runner):
    without_a_fault(runner, MUTANTS)


TEST = ("privacy/test_keys.py::test_derivation_is_hmac_of_hmac",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "old, new, code",
    [
        ("KEY_BYTES = 32\n", "KEY_BYTES = 16 + 16\n", 0),  # does no harm
        ("return hmac.digest(", "return hmca.digest(", 1),  # fails, but not by what it does
        ("import hmac\n", "import hmca\n", 2),  # cannot be imported
    ],
)
def test_what_is_no_catch(runner, old, new, code):
    mutant = Mutant(1, "none", "privacy/keys.py", old, new, TEST)
    outcome = runner.run(mutant, node_ids(mutant))
    assert outcome.code == code, str(outcome)
    assert not outcome.caught


@pytest.mark.slow
def test_what_needs_ranks_passes_without_a_fault(runner):
    """Else each fault that is looked for on ranks would seem to be caught."""
    test = "gradients/test_exactness.py::test_every_pair_of_values[microbatch-(1, 1, 2)]"
    outcome = runner.run(None, (f"tests/{test}",))
    assert outcome.passed, str(outcome)


def test_a_copy_is_what_is_tested(tmp_path):
    copy_tree(tmp_path / "copy")
    found = subprocess.run(
        [sys.executable, "-c", "import torchtitan_dp; print(torchtitan_dp.__path__[0])"],
        cwd=tmp_path / "copy",
        env={"PYTHONPATH": str(tmp_path / "copy")},
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == str(tmp_path / "copy" / "torchtitan_dp")
