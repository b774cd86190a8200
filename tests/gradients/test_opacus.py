"""Our reference loop and Opacus' GradSampleModule agree on every per-sample gradient."""

import torch
import torch.nn.functional as F
from opacus import GradSampleModule

from tests import build
from torchtitan_dp.models.loss import per_sample_loss
from torchtitan_dp.models.parameters import canonical_name


def test_the_reference_is_what_opacus_computes():
    tokens_NT, labels_NT = build.data(samples=3)
    expected = build.reference_gradients(build.reference_model(), tokens_NT, labels_NT)
    model = GradSampleModule(build.reference_model(), loss_reduction="sum")
    targets_N = (labels_NT != -100).sum(dim=1)
    per_sample_loss(model(tokens_NT), labels_NT, targets_N).sum().backward()
    for name, parameter in model._module.named_parameters():
        for i, gradient in enumerate(expected):
            g = gradient[canonical_name(name)]
            assert (parameter.grad_sample[i] - g).norm() <= 1e-5 * g.norm() + 1e-8, (name, i)


def test_row06_the_loss_is_the_mean_over_the_samples_own_targets():
    generator = torch.Generator().manual_seed(0)
    logits_BTV = torch.randn(4, build.T, build.VOCABULARY, dtype=torch.float64, generator=generator)
    _, labels_BT = build.data(samples=4)
    labels_BT[3] = -100
    targets_B = (labels_BT != -100).sum(dim=1)
    loss_B = per_sample_loss(logits_BTV, labels_BT, targets_B)
    for i in range(3):
        mean = F.cross_entropy(logits_BTV[i].float(), labels_BT[i], ignore_index=-100)
        assert torch.allclose(loss_B[i], mean, rtol=1e-6)
    assert loss_B[3] == 0
