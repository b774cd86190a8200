"""What the default suite leaves out exists."""

import ast
import re
from pathlib import Path

import pytest

from tests.thorough import PATTERNS, is_thorough

TESTS = Path(__file__).parent


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_is_of_a_test_that_is_there(pattern: str) -> None:
    file, _, rest = pattern.replace("\\", "").partition("::")
    name = re.match(r"\w+", rest)
    assert name is not None
    functions = [
        node.name
        for node in ast.parse((TESTS / file).read_text()).body
        if isinstance(node, ast.FunctionDef)
    ]
    assert any(function.startswith(name[0]) for function in functions)


def test_a_test_whose_cases_are_left_out_keeps_some() -> None:
    test = "tests/gradients/test_exactness.py::test_ring_variants"
    assert is_thorough(f"{test}[4-headtail-allgather]")
    assert not is_thorough(f"{test}[2-headtail-allgather]")
