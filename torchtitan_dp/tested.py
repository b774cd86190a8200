"""The releases that this package is tested with; with others it runs too, after a warning."""

import importlib.metadata
import platform

RELEASES = {
    "Python": ("3.10", "3.11", "3.13", "3.14"),
    "torch": ("2.11", "2.13", "2.15"),
}
"""Each has a row in docs/install.md, made by `scripts/versions.py`; a test compares them."""


def untested() -> list[str]:
    """Return a warning, one line, for each of them that is here in another release."""
    found = {"Python": platform.python_version(), "torch": importlib.metadata.version("torch")}
    return [
        f"warning: {name} {found[name]} was not tested ({', '.join(releases)} were): train with it "
        "only if python -m torchtitan_dp.selfcheck passes"
        for name, releases in RELEASES.items()
        if minor(found[name]) not in releases
    ]


def minor(version: str) -> str:
    """Return a version's first two numbers.

    >>> minor("2.15.0+cu132")
    '2.15'
    """
    return ".".join(version.split(".")[:2])
