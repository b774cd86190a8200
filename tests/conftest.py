"""In which order files are tested, and what `run_tests.sh fast` leaves out."""

import os

import pytest

from tests import forks

# The longest first, so that the workers end together; the fixtures of a file are made once.
LONGEST = (
    "tests/hazards/test_mutants.py",
    "tests/test_meshes.py",
    "tests/hazards/test_run.py",
    "tests/models/test_hugging_face_run.py",
    "tests/plan/test_memory.py",
    "tests/hazards/test_clipping.py",
    "tests/hazards/test_audit.py",
    "tests/checkpoint/test_resume.py",
    "tests/test_faults.py",
    "tests/hazards/test_crashes.py",
)
FAST = "TORCHTITAN_DP_FAST_TESTS"
"""An environment variable: set, tests that ask for another process are skipped."""


def pytest_configure(config: pytest.Config) -> None:
    if hides_devices(config.getoption("markexpr")):
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""


def hides_devices(marks: str) -> bool:
    """All tests but those of `-m cuda` run on gloo and the CPU, also where there are devices."""
    return not marks.startswith("cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first."""
    rank = {file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(_file(item), len(rank)))  # the others stay as they are


def pytest_runtest_setup(item: pytest.Item) -> None:
    forks.offered = FAST not in os.environ or item.get_closest_marker("smoke") is not None


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
