"""Our reference loop and Opacus' GradSampleModule agree on every per-sample gradient."""

import torch.nn as nn
from opacus import GradSampleModule

from tests import build
from torchtitan_dp.models.loss import per_sample_loss
from torchtitan_dp.models.parameters import canonical_name


def test_the_reference_is_what_opacus_computes():
    tokens_NT, labels_NT = build.data(samples=3)
    expected = build.reference_gradients(build.reference_model(), tokens_NT, labels_NT)
    ours = build.reference_model()
    nn.Module.train(ours)  # as ours stays in eval mode, where Opacus computes nothing
    model = GradSampleModule(ours, loss_reduction="sum")
    targets_N = (labels_NT != -100).sum(dim=1)
    per_sample_loss(model(tokens_NT), labels_NT, targets_N).sum().backward()
    for name, parameter in model._module.named_parameters():
        for i, gradient in enumerate(expected):
            g = gradient[canonical_name(name)]
            assert (parameter.grad_sample[i] - g).norm() <= 1e-5 * g.norm() + 1e-8, (name, i)
