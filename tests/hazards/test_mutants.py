"""Every hazard's fault, put into a copy of the package, makes the test fail that is there for it.

The default suite runs the first mutant of each room, whose test needs one process. All of them:

    ./scripts/run_tests.sh -m mutants
"""

from collections.abc import Iterator

import pytest

from tests.hazards.mutants.runner import Runner, running
from tests.hazards.mutants.table import ROOT, Mutant, read

ROWS = set(range(1, 87))
ROOMS = read()
MUTANTS = [mutant for room in ROOMS.values() for mutant in room]
FIRST = [room[0] for room in ROOMS.values()]


def test_every_row_has_a_mutant():
    assert {mutant.row for mutant in MUTANTS} == ROWS


def test_the_texts_to_replace_occur_once_and_the_results_are_python():
    """Code that moved must take its mutants along."""
    wrong = []
    for mutant in MUTANTS:
        text = (ROOT / mutant.file).read_text()
        if text.count(mutant.old) != 1:
            wrong.append(f"{mutant.name}: {text.count(mutant.old)} times in {mutant.file}")
        compile(text.replace(mutant.old, mutant.new), f"{mutant.file}, {mutant.name}", "exec")
    assert wrong == []


def test_the_tests_exist():
    """By name, without collecting them all: the function is defined in the file."""
    for mutant in MUTANTS:
        file, _, name = mutant.test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), mutant.test


@pytest.fixture(scope="module")
def runner(tmp_path_factory) -> Iterator[Runner]:
    with running(tmp_path_factory.mktemp("mutants")) as started:
        yield started


def require_caught(runner: Runner, mutant: Mutant) -> None:
    outcome = runner.run(mutant, mutant.test)
    assert outcome.caught, f"{mutant.name} survived: {outcome}"


@pytest.mark.slow
@pytest.mark.parametrize("mutant", FIRST, ids=lambda mutant: mutant.name)
def test_the_first_mutant_of_each_room_is_caught(runner, mutant):
    require_caught(runner, mutant)


@pytest.mark.mutants
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(runner, mutant):
    require_caught(runner, mutant)


@pytest.mark.mutants
@pytest.mark.timeout(1500)
def test_without_a_fault_all_pass(runner):
    """In the same surroundings: it is the fault that fails them."""
    outcome = runner.run(None, *dict.fromkeys(mutant.test for mutant in MUTANTS))
    assert outcome.passed, str(outcome)


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
    test = "tests/privacy/test_keys.py::test_derivation_is_hmac_of_hmac"
    outcome = runner.run(Mutant(1, "none", "torchtitan_dp/privacy/keys.py", test, old, new), test)
    assert outcome.code == code, str(outcome)
    assert not outcome.caught


@pytest.mark.slow
def test_what_needs_ranks_passes_without_a_fault(runner):
    """Else each fault that is looked for on ranks would seem to be caught."""
    test = "tests/gradients/test_exactness.py::test_every_pair_of_values[microbatch-(1, 1, 2)]"
    outcome = runner.run(None, test)
    assert outcome.passed, str(outcome)
