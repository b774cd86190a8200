"""The baseline: a private run's modules, and the ordinary gradient of a step's mean token loss."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule

from tests import build
from tests.processes.ranks import on_ranks
from torchtitan_dp.models.hugging_face import on_meta
from torchtitan_dp.models.parallelize import parallelize
from torchtitan_dp.models.parameters import canonical_name
from torchtitan_dp.selfcheck.reference import rounding
from torchtitan_dp.selfcheck.small import whole
from torchtitan_dp.train.spec import BaselineTrainer

# isort: split
from torchtitan.distributed import utils as dist_utils

CHUNKS, GATHERED = "--training.loss_chunk_tokens=7", "--parallelism.keep_weights_gathered"
TILES = ("--training.feed_forward_chunk=5", "--activation_checkpoint.mode=full")
BF16 = "--training.mixed_precision_param=bfloat16"
MICROBATCHES = 2


def laid_out(degrees, *overrides):
    """A model on the mesh of a run, and the run's configuration."""
    config = build.config(*overrides, degrees=degrees)
    model = on_meta(build.ARGS)
    parallelize(model, build.mesh("cpu", degrees)[0], config)
    return model, config


def modules_of(degrees, *overrides):
    """What decides how a model is computed: classes and FSDP2 groups, and what stays gathered."""
    model, _ = laid_out(degrees, *overrides)
    found = []
    for name, module in model.named_modules():
        kept = None
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            kept = group and (group.mp_policy, group._reshard_after_forward)
        found.append((name, [kind.__qualname__ for kind in type(module).__mro__], str(kept)))
    return found


@pytest.mark.parametrize("overrides", [(), (CHUNKS, GATHERED, BF16), TILES], ids=str)
@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 2)], ids=str)
def test_the_modules_are_those_of_a_private_run(degrees, overrides):
    size = degrees[-1]
    (private, *_), (plain, *_) = (
        on_ranks(size, modules_of, degrees, *overrides, switch)
        for switch in ("--privacy.enable", "--privacy.no-enable")
    )
    assert plain == private
    assert any("LossHead" in kinds for _, kinds, _ in plain)
    assert any("LeanRMSNorm" in kinds for _, kinds, _ in plain)


def step_of(degrees, samples, *overrides):
    """The gradient of two microbatches, whole, the norm by which TorchTitan clips, and the loss."""
    model, config = laid_out(degrees, "--privacy.no-enable", *overrides)
    model.to_empty(device="cpu")
    model.init_weights()
    parameters = {canonical_name(n): p for n, p in model.named_parameters()}
    dims = build.mesh("cpu", degrees)[0]
    trainer = object.__new__(BaselineTrainer)
    vars(trainer).update(
        {"model_parts": [model], "parallel_dims": dims, "device": torch.device("cpu")},
        **{"job_config": config, "model_args": SimpleNamespace(), "_microbatches": 0},
        gradient_accumulation_steps=MICROBATCHES,
    )
    ranks, rank = dims.dp_replicate * dims.dp_shard, torch.distributed.get_rank() // dims.cp
    tokens_NT, labels_NT = (part.chunk(ranks)[rank].chunk(MICROBATCHES) for part in samples)
    valid = float((samples[1] >= 0).sum())
    losses = [
        trainer.forward_backward_step(
            input_dict={"input": tokens}, labels=labels, global_valid_tokens=valid
        )
        for tokens, labels in zip(tokens_NT, labels_NT, strict=True)
    ]
    norm = dist_utils.clip_grad_norm_([*model.parameters()], 1e9, foreach=True)
    return {n: whole(p.grad) for n, p in parameters.items()}, float(norm), float(sum(losses))


@pytest.mark.parametrize(
    ("degrees", "overrides"),
    [
        ((1, 1, 1), (CHUNKS, "--training.local_batch_size=2")),
        ((1, 1, 1), ("--training.loss_chunk_tokens=0", "--training.local_batch_size=2")),
        ((1, 1, 1), (CHUNKS, *TILES)),
        ((1, 1, 1), (BF16, "--training.local_batch_size=2")),
        ((1, 2, 1), (GATHERED,)),
        ((1, 1, 2), (CHUNKS, "--training.local_batch_size=2")),
        ((2, 1, 1), ()),
    ],
    ids=str,
)
def test_the_gradient_is_that_of_the_mean_loss(degrees, overrides):
    data_parallel = degrees[0] * degrees[1]
    several = "--training.local_batch_size=2" in overrides
    samples = build.data(MICROBATCHES * data_parallel * (2 if several else 1))
    model, (tokens_NT, labels_NT) = build.reference_model().double(), samples
    loss = F.cross_entropy(model(tokens_NT).flatten(0, 1), labels_NT.flatten(), ignore_index=-100)
    loss.backward()
    expected = {canonical_name(n): p.grad for n, p in model.named_parameters()}
    found = on_ranks(data_parallel * degrees[2], step_of, degrees, samples, *overrides)
    bound = rounding(torch.bfloat16 if BF16 in overrides else torch.float32)
    for gradient, norm, _ in found:
        assert build.relative_error(gradient, expected) < bound
        assert norm == pytest.approx(build.norm(expected), rel=bound)
    assert sum(part for *_, part in found) == pytest.approx(loss.item(), rel=bound)
