"""The kernels that a GPU runs, without one: PyTorch's CUDA build generates and compiles them, and
Triton's interpreter runs them.

The interpreter takes logarithms and sines from torch, as the CPU does. So the values say that a
kernel computes the same formulas, on positions of 64 bits; CUDA's own functions (libdevice) and
rounding to bfloat16 are not in them, and the machine code says which are called.
"""

import ast
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.compiled import CASES
from tests.processes import forks
from tests.processes.runs import ROOT, said

TARGETS = {(8, 0): "sm_80", (9, 0): "sm_90a", (10, 0): "sm_100a"}  # A100, H100, B200
OF_LAYERS = {"norm", "add and norm", "rotate", "swiglu", "backward of swiglu"}

APPROXIMATE = re.compile(r"\s([a-z]\w*\.(?:\w+\.)*(?:approx|full)\b[\w.]*|tanh\.[\w.]+)")
ALLOWED = {
    # Where Newton's steps begin in libdevice's fp64 logarithm; its divisions are div.rn.
    "secure noise": {"rcp.approx.ftz.f64"},
    # Of the fraction, in libdevice's exp; the loss and its gradients are those of a model.
    "loss, fp32": {"ex2.approx.ftz.f32"},
    "loss, bf16": {"ex2.approx.ftz.f32"},
}

VALUES = {
    "noise": 49_152,
    "secure noise": 3_072,
    "clip": 32_768,
    "loss, fp32": 16_064,
    "loss, bf16": 16_064,
}
# (differing values, ulps) at most. log p, of which the GPU takes exp once and the CPU by another
# way, is up to 30 and rounded. The interpreter cuts bf16 where the GPU has cvt.rn.bf16.
APART = {"loss, fp32": (0.2, 64), "loss, bf16": (0.6, 2)}

needs_cuda_build = pytest.mark.skipif(
    torch.version.cuda is None, reason="needs PyTorch's CUDA build, a device not"
)


def answered(question: str, capability: tuple[int, int], **environment: str) -> dict:
    forks.need()
    pytest.importorskip("triton", reason="PyTorch's CUDA build is here without Triton")
    done = said(sys.executable, "-m", "tests.kernels.gpu", question, *capability, **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module", params=TARGETS, ids=TARGETS.values())
def target(request):
    return TARGETS[request.param], answered("ptx", request.param)


@pytest.fixture(scope="module")
def values():
    return answered("values", (9, 0), TRITON_INTERPRET="1")


def test_every_compiled_function_is_here():
    compiled = {
        ast.unparse(node.args[0])
        for path in Path(ROOT, "torchtitan_dp").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("compile_kernel", "compile_", "torch.compile")
    }
    # compile_kernel itself, what is made for TorchTitan's modules, and those of transformers.
    of_helpers = {"function", "block.forward"}
    assert compiled - of_helpers == {case.function.__name__ for case in CASES.values()}


@needs_cuda_build
@pytest.mark.slow
def test_every_kernel_is_compiled(target):
    name, ptx = target
    assert ptx.keys() == CASES.keys()
    for kernels in ptx.values():
        assert kernels
        assert {re.search(r"\.target (\w+)", kernel)[1] for kernel in kernels} == {name}


@needs_cuda_build
@pytest.mark.slow
def test_instructions_that_approximate_are_known(target):
    """None in noise and clipping."""
    for name, kernels in target[1].items():
        if name not in OF_LAYERS:
            found = {one for kernel in kernels for one in APPROXIMATE.findall(kernel)}
            assert found == ALLOWED.get(name, set()), name
    assert "cvt.rn.bf16" in "".join(target[1]["loss, bf16"])


@needs_cuda_build
@pytest.mark.slow
def test_clipping_rounds_its_product_and_its_sum(target):
    """Each once: a product that goes into the sum unrounded would give the GPU other bits."""
    for kernel in target[1]["clip"]:
        assert re.findall(r"\s(?:fma|mad)\.\w*\.?f32", kernel) == []


@needs_cuda_build
@pytest.mark.slow
@pytest.mark.parametrize("name", ["noise", "secure noise"])
def test_positions_are_of_64_bits(target, name):
    """An index is added to the start, as it was read, and the upper word of that sum is used."""
    for kernel in target[1][name]:
        read = "|".join(re.findall(r"ld\.global\.b64\s+\{ (%rd\d+) \}", kernel))
        add = rf"add\.s64\s+(%rd\d+), (?:(?:{read}), %rd\d+|%rd\d+, (?:{read}));"
        positions = "|".join(re.findall(add, kernel))
        upper = rf"mov\.b64\s+\{{_, %r\d+\}}, ({positions});|shr\.[us]64\s+\S+ ({positions}), 32;"
        assert read
        assert positions
        assert re.search(upper, kernel)


@needs_cuda_build
@pytest.mark.slow
@pytest.mark.parametrize("name", VALUES)
def test_values_are_the_cpus(values, name):
    found, (share, ulps) = values[name], APART.get(name, (0.0, 0))
    assert found["values"] == VALUES[name]
    assert found["differ"] <= share * found["values"]
    assert found["ulps"] <= ulps
