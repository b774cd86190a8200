"""A line a room of tests, in the place of pytest's dots: `pytest -p tests.rooms`.

    ✓ privacy        812 passed, 4 skipped

A room is a folder of tests/; those directly in it, which drive whole commands, are "commands".
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import PurePosixPath

import pytest

OUTCOMES = ("passed", "failed", "skipped")


class Rooms:
    """Counts the outcomes of each room, and prints its line once its last test is done."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.left: dict[str, set[str]] = {}
        self.outcomes: dict[str, Counter[str]] = {}

    def expect(self, tests: Iterable[str]) -> None:
        """Enter the names of all tests that will run; each worker of xdist has the same."""
        for test in tests:
            self.left.setdefault(room(test), set()).add(test)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.expect(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        if not self.outcomes:
            self.expect(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = room(report.nodeid)
        counts = self.outcomes.setdefault(name, Counter())
        if report.when == "call" or report.outcome != "passed":  # also a set-up that fails or skips
            counts[report.outcome] += 1
        if report.when == "teardown":
            self.left[name].discard(report.nodeid)
            if not self.left[name]:
                self.show(name, counts)

    def show(self, name: str, counts: Counter[str]) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        assert terminal is not None
        mark, color = ("✗", {"red": True}) if counts["failed"] else ("✓", {"green": True})
        found = ", ".join(
            f"{counts[outcome]:,} {outcome}" for outcome in OUTCOMES if counts[outcome]
        )
        terminal.ensure_newline()
        terminal.write(mark, **color)
        terminal.write_line(f" {name:<14} {found}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str]:
        if report.when != "call" and report.outcome != "skipped":
            return ("error" if report.failed else "", "", "")
        return (report.outcome, "", "")


def room(test: str) -> str:
    """Return the room of a test, from pytest's name of it."""
    first, *folders = PurePosixPath(test.partition("::")[0]).parts[:-1]
    return folders[0] if folders else "commands" if first == "tests" else first


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Rooms(config), "rooms")
