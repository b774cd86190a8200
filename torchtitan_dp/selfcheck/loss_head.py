"""The chunked loss head against the plain one."""

from collections.abc import Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F
from torchtitan.components.loss import IGNORE_INDEX

from torchtitan_dp.models.loss_head import LossHead
from torchtitan_dp.selfcheck.ranks import Ranks
from torchtitan_dp.selfcheck.reference import relative_error, rounding
from torchtitan_dp.selfcheck.result import Measured
from torchtitan_dp.selfcheck.terms import Terms

_CHUNK = 32
_TOKENS = 3 * _CHUNK + 5


def loss_head(ranks: Ranks, terms: Terms) -> Sequence[Measured]:
    """Compare one sample's loss and its gradients, over three chunks and a rest.

    Targets are ignored on both sides of an edge, and at the end. What is compared in bf16 was
    rounded to it before, so that the difference is the head's alone.
    """
    generator = torch.Generator().manual_seed(0)
    args = terms.args
    weight_VD = torch.randn(args.vocab_size, args.dim, generator=generator) * args.dim**-0.5
    h_1TD = torch.randn(1, _TOKENS, args.dim, generator=generator)
    weight_VD, h_1TD = weight_VD.to(terms.dtype), h_1TD.to(terms.dtype)
    labels_1T = torch.randint(0, args.vocab_size, (1, _TOKENS), generator=generator)
    for ignored in (_CHUNK - 1, 2 * _CHUNK, _TOKENS - 1):
        labels_1T[0, ignored] = IGNORE_INDEX

    true_w, true_h = (x.double().requires_grad_() for x in (weight_VD, h_1TD))
    true_loss = F.cross_entropy((true_h @ true_w.T)[0], labels_1T[0], ignore_index=IGNORE_INDEX)
    true_loss.backward()

    output = nn.Linear(args.dim, args.vocab_size, bias=False, device=ranks.device)
    output.weight = nn.Parameter(weight_VD.to(ranks.device))
    h, labels = h_1TD.to(ranks.device).requires_grad_(), labels_1T.to(ranks.device)
    loss_1 = LossHead.over(output, _CHUNK)(h, labels, (labels != IGNORE_INDEX).sum(1))
    loss_1.sum().backward()
    bound = rounding(terms.dtype)
    assert true_h.grad is not None
    assert true_w.grad is not None
    assert h.grad is not None
    assert output.weight.grad is not None
    gradients = {"h": h.grad.cpu(), "weight": output.weight.grad.cpu()}
    true = {"h": true_h.grad, "weight": true_w.grad}
    return (
        Measured("the loss", abs(loss_1.item() / true_loss.item() - 1), bound),
        *(
            Measured(
                f"the gradient of {name}", relative_error({name: g}, {name: true[name]}), bound
            )
            for name, g in gradients.items()
        ),
    )
