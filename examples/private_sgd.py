"""DP-SGD by hand, on a plain PyTorch model, with the public names of `torchtitan_dp` alone.

    .venv/bin/python examples/private_sgd.py

It shows what each step of the trainer comes to, without TorchTitan, meshes or long records: draw
records by Poisson sampling, form a gradient for each, clip, add up, add noise once, and divide by
the expected batch size. The accountant says how much the weights reveal of one record at most.

Guarantee:
    The weights are (epsilon, delta)-DP for one record that is replaced by an empty one, whose
    gradient is 0. The number of records is public; the accuracy is that on other, public records.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from torchtitan_dp import (
    Mechanism,
    RootKey,
    Segment,
    add_clipped_,
    add_gaussian_noise_,
    clip,
    epsilon,
    noise_for,
    poisson_draw,
    squared_norm,
)

RECORDS, EXPECTED_BATCH, STEPS, C = 2_000, 100, 60, 1.0
TARGET_EPSILON, DELTA = 3.0, 1e-5  # delta is well below 1 / RECORDS


def make_records(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return `count` points in 20 dimensions, and on which side of a fixed plane each one is."""
    x_ND = torch.randn(count, 20, generator=torch.Generator().manual_seed(seed))
    plane_D = torch.randn(20, generator=torch.Generator().manual_seed(0))
    return x_ND, (x_ND @ plane_D > 0).long()


def main() -> None:
    """Train privately, and print epsilon and the accuracy."""
    torch.manual_seed(0)  # for the first weights alone, which are public
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 2))
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.Adam(parameters.values(), lr=0.03)
    x_ND, y_N = make_records(RECORDS, seed=1)

    def loss(weights: dict[str, Tensor], x_D: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, weights, x_D[None]), y[None])

    per_sample_gradients = vmap(grad(loss), in_dims=(None, 0, 0))
    q, account = EXPECTED_BATCH / RECORDS, {"delta": DELTA, "accountant": "pld"}
    mechanism = Mechanism(1.0, q)  # of a step, for the search with any noise
    sigma = noise_for(mechanism, STEPS, target_epsilon=TARGET_EPSILON, **account)
    root = RootKey.from_os()  # secret, in memory only: who has it can subtract the noise
    sampling_keys, noise_keys = root.stream("sampling"), root.stream("noise")

    for step in range(1, STEPS + 1):
        draw_B = torch.from_numpy(poisson_draw(sampling_keys.take(step), RECORDS, q))
        sums = {name: torch.zeros(p.numel()) for name, p in parameters.items()}
        if len(draw_B):  # an empty draw is a step like the others: noise alone
            weights = {name: p.detach() for name, p in parameters.items()}
            gradients = per_sample_gradients(weights, x_ND[draw_B], y_N[draw_B])
            flat = {name: g.flatten(1) for name, g in gradients.items()}
            norm_B = torch.stack([squared_norm(g_BP) for g_BP in flat.values()]).sum(0)
            clipped = clip(norm_B, torch.ones_like(draw_B, dtype=torch.bool), max_grad_norm=C)
            for name, g_BP in flat.items():
                for g_P, *scale in zip(g_BP, clipped.factor_B, clipped.rejected_B, strict=True):
                    add_clipped_(sums[name], g_P, *scale)
        key = noise_keys.take(step)  # a key serves once
        for name, p in parameters.items():
            add_gaussian_noise_(sums[name], std=sigma * C, key=key, name=name, start=0)
            p.grad = (sums[name] / EXPECTED_BATCH).view_as(p)  # not by the size of the draw
        optimizer.step()

    spent = epsilon([Segment(mechanism.with_noise(sigma), STEPS)], **account)
    x_ND, y_N = make_records(1_000, seed=2)
    accuracy = (model(x_ND).argmax(1) == y_N).float().mean().item()
    print(f"epsilon = {spent:.3f} at delta = {DELTA:g}, after {STEPS} steps with sigma {sigma:.3f}")
    print(f"accuracy on 1,000 other records = {accuracy:.1%}")


if __name__ == "__main__":
    main()
