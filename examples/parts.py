"""Each public name of torchtitan_dp at work, cell by cell, as in a notebook.

.venv/bin/python examples/parts.py [RUN …]      RUN: folders of runs, whose ledgers are added up
"""

# %% What a plan spends: 1,000 steps that draw 1% of the records each, at delta = 1e-5.
import os
import sys

import torch

import torchtitan_dp as dp

account = {"delta": 1e-5, "accountant": "pld"}
sigma = dp.noise_for(dp.Mechanism(1.0, 0.01), 1_000, target_epsilon=3.0, **account)
steps = dp.Segment(dp.Mechanism(sigma, 0.01), 1_000)
epsilon = dp.epsilon([steps], **account)
print(f"sigma = {sigma:.3f} spends epsilon = {epsilon:.3f}")
for line in dp.meaning([steps], account["delta"]).sentences("patient", epsilon, account["delta"]):
    print(line)

# %% Who takes part in step 1: each record by a coin of its own, from a secret key.
root = dp.RootKey.from_os()
drawn = dp.poisson_draw(root.stream("sampling").take(1), population=200, sample_rate=0.01)
print(f"step 1 draws {len(drawn)} of 200 records")

# %% Losses of samples, then their gradients: one row a sample, here of one matrix.
weight_VD = torch.randn(11, 4, requires_grad=True)
h_BTD, labels_BT = torch.randn(3, 5, 4), torch.randint(0, 11, (3, 5))
loss_B = dp.per_sample_loss(h_BTD @ weight_VD.T, labels_BT, torch.full((3,), 5))
gradients = [torch.autograd.grad(loss, weight_VD, retain_graph=True)[0] for loss in loss_B]
gradient_BN = torch.stack([gradient.flatten() for gradient in gradients])

# %% Their clipped sum, in which each sample counts at most C = 1.
valid_B = torch.ones(3, dtype=torch.bool)  # False for padding
clipped = dp.clip(dp.squared_norm(gradient_BN), valid_B, max_grad_norm=1.0)
sum_N = torch.zeros(weight_VD.numel())
for gradient_N, factor, rejected in zip(
    gradient_BN, clipped.factor_B, clipped.rejected_B, strict=True
):
    dp.add_clipped_(sum_N, gradient_N, factor, rejected)

# %% The step's noise: two shards of a parameter have the noise that the whole would have.
key = root.stream("noise").take(1)
for start, shard_N in ((0, sum_N[:20]), (20, sum_N[20:])):
    dp.add_gaussian_noise_(shard_N, std=sigma * 1.0, key=key, name="weight", start=start)
print(f"a noised sum of norm {sum_N.norm():.2f}")

# %% A model of transformers laid over a mesh, as a run has it: under torchrun.
if "RANK" in os.environ:
    from torchtitan.distributed import ParallelDims

    from torchtitan_dp.config.load import load_config
    from torchtitan_dp.models.hugging_face import flavor, on_meta

    ranks = int(os.environ["WORLD_SIZE"])
    overrides = "--privacy.noise_multiplier=1 --privacy.delta=1e-5 --training.global_batch_size=4"
    config = load_config([*overrides.split(), f"--training.seq_len={64 * ranks}"], ranks)
    torch.distributed.init_process_group("gloo")
    dims = ParallelDims(1, 1, ranks, 1, 1, 1, 1, ranks)
    dims.build_mesh()
    model = dp.parallelize(on_meta(flavor("debug")), dims, config)
    print(f"rank {os.environ['RANK']}: {type(model).__name__} on {ranks} ranks")
    torch.distributed.destroy_process_group()

# %% What runs have spent, verified, and added up.
if runs := [dp.read_ledger(folder) for folder in sys.argv[1:]]:
    print(f"{len(runs)} runs: epsilon = {dp.add_up(runs).epsilon}")
