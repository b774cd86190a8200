"""The attention operators that the package calls have these arguments, in the installed PyTorch."""

from typing import get_args

import pytest
import torch

import torchtitan_dp.distributed  # noqa: F401

# isort: split

from torchtitan_dp.base.torch_private import AttentionKernel, attention_operators
from torchtitan_dp.distributed.windows import kernel_of

QKV = "Tensor query, Tensor key, Tensor value"
SEQUENCES = "Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k"
PHILOX = "Tensor philox_seed, Tensor philox_offset"
SCALE = "*, float? scale=None"
BIASED = f"{QKV}, Tensor? attn_bias, bool compute_log_sumexp"
CALLED = "float dropout_p=0., bool is_causal=False"
MASK = "*, Tensor? attn_mask=None, float? scale=None"

FORWARD = {
    "flash": f"{QKV}, {CALLED}, bool return_debug_mask=False, {SCALE}",
    "cudnn": f"{BIASED}, {CALLED}, bool return_debug_mask=False, {SCALE}",
    "efficient": f"{BIASED}, {CALLED}, {SCALE}",
    "cpu": f"{QKV}, {CALLED}, {MASK}",
}
RESULTS = f"Tensor grad_out, {QKV}, Tensor out, Tensor logsumexp"
BACKWARD = {
    "flash": f"{RESULTS}, {SEQUENCES}, float dropout_p, bool is_causal, {PHILOX}, {SCALE}",
    "cudnn": f"{RESULTS}, {PHILOX}, Tensor attn_bias, {SEQUENCES}, float dropout_p, "
    f"bool is_causal, {SCALE}",
    "efficient": f"Tensor grad_out_, {QKV}, Tensor attn_bias, Tensor out, Tensor logsumexp, "
    f"{PHILOX}, float dropout_p, bool[4] grad_input_mask, bool is_causal=False, {SCALE}",
    "cpu": f"{RESULTS}, float dropout_p, bool is_causal, {MASK}",
}


@pytest.mark.parametrize("kernel", get_args(AttentionKernel))
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_an_operator_has_these_arguments(kernel, way):
    """Callers name some, and PyTorch hands others over by their order."""
    operator = attention_operators(kernel)[way == "backward"]
    arguments, returns = str(operator._schema).split("(", 1)[1].split(") -> ")
    assert arguments == {"forward": FORWARD, "backward": BACKWARD}[way][kernel]
    number = returns.count(",") + 1
    assert number >= (2 if way == "forward" else 3)  # out, logsumexp; of query, key, value


@pytest.mark.parametrize("bias", [False, True])
def test_cudas_kernel_is_called_with_arguments_that_it_takes(bias):
    """On tensors without content, of a sequence whose logsumexp is padded."""
    query, key, value = (torch.empty(1, heads, 40, 64, device="meta") for heads in (4, 2, 2))
    mask = torch.empty(40, 40, device="meta") if bias else None
    kernel = kernel_of(torch.device("cuda"), softcap=None)
    terms = {"bias": mask, "is_causal": not bias, "scale": 0.125}
    out, logsumexp, *more = kernel.forward(query, key, value, **terms)
    assert (out.shape, logsumexp.shape) == (query.shape, (1, 4, 40))
    tensors = {"grad_out": out, "query": query, "key": key, "value": value, "out": out}
    grads = kernel.backward(**tensors, logsumexp=logsumexp, more=more, **terms)
    assert [x.shape for x in grads] == [query.shape, key.shape, value.shape]
