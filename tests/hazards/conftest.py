"""The campaign of all mutants takes long: it runs when `-m` names it, and else is left out."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "mutants" in str(config.getoption("markexpr")):
        return
    left_out = [item for item in items if item.get_closest_marker("mutants")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
