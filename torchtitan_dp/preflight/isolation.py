"""Whether a sample's losses depend on the samples beside it, tried on a small model of a class.

Experts take the tokens of all samples at once, so another sample decides in which row of a product
a token lies, and by it how the product rounds; routing turns rounding into jumps. Mathematically
nothing changed, so here each product's rows are scaled by where they lie.
"""

from typing import Any

import torch
from torch import Tensor

from torchtitan_dp.models.causal_lm.model import CausalLM
from torchtitan_dp.models.causal_lm.settings import ModelArgs
from torchtitan_dp.torch_private import DispatchMode

_TOKENS, _VOCABULARY = 16, 64


def check_forward(args: ModelArgs, samples: int) -> None:
    """Refuse, by ValueError, a model whose modules ask for what is not built, or mix the samples of
    a microbatch where no module shows it: a small one computes logits."""
    shared = args.n_heads // args.n_kv_heads
    sizes = {"n_layers": 1, "vocab_size": _VOCABULARY, "max_seq_len": _TOKENS}
    small = args.with_heads(2 * shared, 2, **sizes)
    with torch.device("cpu"), torch.no_grad():
        model = CausalLM(small)
        model(torch.zeros(1, _TOKENS, dtype=torch.int64))
        if samples > 1 and model.meeting is None and is_moved_by_others(model):
            raise ValueError(
                f"training.local_batch_size = {samples}: in a {type(model.model).__name__} a "
                "sample's losses depend on the samples beside it; set it to 1"
            )


def is_moved_by_others(model: CausalLM) -> bool:
    """Return whether a sample's logits move with the samples beside it."""
    generator = torch.Generator().manual_seed(0)
    first, *others = torch.randint(_VOCABULARY, (4, 1, _TOKENS), generator=generator)
    model.init_weights()
    with torch.no_grad(), _ScaledByPlace():
        before, *after = (model(torch.cat((first, other)))[0] for other in others)
    return not all(torch.equal(logits, before) for logits in after)


class _ScaledByPlace(DispatchMode):
    """Scales each row of a product's result by its place, and by the number of rows."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if "mm" in function.overloadpacket.__name__:  # mm, addmm, bmm, baddbmm, _grouped_mm
            assert isinstance(result, Tensor)
            rows = result.shape[:-1].numel()
            places = torch.arange(rows, dtype=result.dtype).mul_(1.7).add_(rows).sin_()
            result.mul_(places.mul_(0.01).add_(1).view(*result.shape[:-1], 1))
        return result
