"""In which order files are tested, what is left out, and what all of a session's workers share."""

import os
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.processes import forks
from torchtitan_dp.base.process import VERBOSE

# The longest first, so that the workers end together; the fixtures of a file are made once.
LONGEST = (
    *("tests/test_examples.py", "tests/hazards/test_clocks.py", "tests/hazards/test_mutants.py"),
    *("tests/test_meshes.py", "tests/hazards/test_run.py", "tests/models/test_hugging_face_run.py"),
    *("tests/plan/test_memory.py", "tests/hazards/test_clipping.py", "tests/hazards/test_audit.py"),
    *("tests/checkpoint/test_resume.py", "tests/hazards/test_crashes.py"),
)
CAMPAIGNS = ("mutants", "thorough")
"""Markers of what runs only if `-m` names it, or its id."""
QUICK = "TORCHTITAN_DP_QUICK_TESTS"
"""An environment variable: set, tests that ask for another process are skipped."""


def pytest_configure(config: pytest.Config) -> None:
    if hides_devices(config.getoption("markexpr")):
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""
    forks.without_help()
    os.environ["HF_HUB_OFFLINE"] = "1"  # no name leaves this machine
    os.environ[VERBOSE] = "1"  # tests read what a start prints for those who ask for all of it
    if not hasattr(config, "workerinput"):  # one cache for all workers, and not the user's
        paths = filter(None, [str(forks.ROOT), os.environ.get("PYTHONPATH")])
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for processes in other folders
        cache = tempfile.TemporaryDirectory(prefix="cache_of_tests_")
        os.environ["XDG_CACHE_HOME"] = cache.name
        config.add_cleanup(cache.cleanup)
    if config.getoption("numprocesses", None) and QUICK not in os.environ:
        os.environ[forks.ADDRESS] = forks.address()  # one server for all workers


def hides_devices(marks: str) -> bool:
    """All tests but those of `-m cuda` run on gloo and the CPU, also where there are devices."""
    return not marks.startswith("cuda")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest files first, leave the campaigns out, and skip what needs CUDA."""
    import torch  # once `pytest_configure` has hidden devices

    named = any("::" in argument for argument in config.args)
    mark_thorough_cases(items, whole=not named)
    asked = str(config.getoption("markexpr"))
    left_out = [] if named else [name for name in CAMPAIGNS if name not in asked]
    out = {item for item in items if any(map(item.get_closest_marker, left_out))}
    if out:
        config.hook.pytest_deselected(items=list(out))
        items[:] = [item for item in items if item not in out]
    if not torch.cuda.is_available():
        for item in filter(lambda item: item.get_closest_marker("cuda"), items):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    rank = {file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(_file(item), len(rank)))  # the others stay as they are


def mark_thorough_cases(items: list[pytest.Item], whole: bool) -> None:
    """Add `thorough` to the cases that `thorough_cases` names. If tests are `whole`, all their
    cases were collected, so that a pattern without a case is a mistake."""
    named: set[tuple[str, str]] = set()
    used: set[tuple[str, str]] = set()
    for item in items:
        test, _, case = item.nodeid.partition("[")
        patterns = [p for mark in item.iter_markers("thorough_cases") for p in mark.args]
        matching = [p for p in patterns if fnmatchcase(case.removesuffix("]"), p)]
        if matching:
            item.add_marker("thorough")
        named.update((test, p) for p in patterns)
        used.update((test, p) for p in matching)
    if whole and (stale := sorted(named - used)):
        raise pytest.UsageError(f"thorough_cases without a case: {stale}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    forks.offered = QUICK not in os.environ or item.get_closest_marker("smoke") is not None


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps what is indexed apart from what other tests keep."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
