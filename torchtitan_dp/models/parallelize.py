"""Lay a model over the mesh `dp_replicate x dp_shard x cp`: CP, compile, AC, FSDP2, in this order.

With privacy FSDP2 lies on the one-dimensional `fsdp = dp_shard x cp` mesh alone: DDP or HSDP over
`dp_replicate` would mix samples before they are clipped. What crosses data-parallel ranks is sent
by `torchtitan_dp.gradients`, after clipping.
"""

from typing import Any, cast

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer import build_optimizers as build_theirs
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config.job_config import Optimizer as OptimizerConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.tools.utils import device_type

from torchtitan_dp.base.torch_private import attention_operators, operations_to_save
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import METHODS, feed_forward_chunk, most_tokens, ring_is_aligned
from torchtitan_dp.distributed.attention import (
    apply_ring_attention,
    configure_ring,
    mesh_of_this_rank,
    use_efficient_attention,
)
from torchtitan_dp.distributed.host_memory import InputsOnHost
from torchtitan_dp.distributed.ring import HEADS_APART_FROM
from torchtitan_dp.gradients.fsdp import fsdp_modules
from torchtitan_dp.gradients.optimizer import MomentumSGD
from torchtitan_dp.models.causal_lm import formulas
from torchtitan_dp.models.causal_lm.model import CausalLM
from torchtitan_dp.models.causal_lm.settings import ModelArgs
from torchtitan_dp.models.feed_forward import Tiling
from torchtitan_dp.models.lora import store_frozen
from torchtitan_dp.models.loss import shard_of
from torchtitan_dp.models.parameters import canonical_name


def parallelize(model: CausalLM, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """Apply CP, `torch.compile`, AC and FSDP2 to a model on the meta device, in place.

    FSDP2 shards fp32 parameters over the `fsdp` mesh, also where that is one rank, so that bf16 and
    fp32 mean the same on every mesh. Attention is a ring over the `cp` mesh.

    Guarantee:
        - With privacy, no gradient crosses data-parallel ranks: backward reduces a sample's
          gradient over the `cp` mesh alone, by the `set_custom_reduce_scatter` that
          `gradients.microbatch` sets later, or by layers that form per-sample gradients. Samples
          meet only after `clipped_sum` clipped each.

    Returns:
        `model` itself, still without values: `to_empty` and weights come next.
    """
    training, privacy = job_config.training, job_config.privacy
    if training.mixed_precision_param == "float16":
        # Where cuBLAS splits a product over many tokens, it would add the parts in fp16, which
        # overflows.
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
    store_frozen(model, dtype, model.kept_in_fp32())
    if training.loss_chunk_tokens:
        model.use_loss_head(training.loss_chunk_tokens)
    if device_type == "cpu":
        formulas.use_lean_norms(model)
    if privacy.enable and METHODS[privacy.gradient_method].per_sample_layers:
        model.use_per_sample_layers()
    _apply_ring(model, parallel_dims, job_config)
    _apply_compile_and_ac(model, job_config)
    mesh = fsdp_mesh(parallel_dims)
    if parallel_dims.dp_replicate_enabled and not privacy.enable:
        degrees = parallel_dims.dp_replicate, mesh.size()
        mesh = init_device_mesh(device_type, degrees, mesh_dim_names=("dp_replicate", "fsdp"))
    _apply_fsdp(model, mesh, dtype, job_config)
    if device_type == "cpu":
        _sum_reductions_only(model)
    return model


def _apply_ring(model: CausalLM, parallel_dims: ParallelDims, job_config: JobConfig) -> None:
    """Attend on a ring over cp; one rank with a long sequence on a ring that takes heads apart."""
    training = job_config.training
    if parallel_dims.cp_enabled:
        model.shard, ring = shard_of(parallel_dims, job_config), parallel_dims.get_mesh("cp")
    else:
        if device_type != "cpu":
            use_efficient_attention(model)
        if training.seq_len < HEADS_APART_FROM or training.mixed_precision_param == "float32":
            return
        ring = mesh_of_this_rank(device_type, "cp")
    configure_ring(model.shard)
    cudnn = takes_cudnn(job_config, model.model_args)
    apply_ring_attention([model.full_attention], ring, cudnn=cudnn)


def _apply_compile_and_ac(model: CausalLM, job_config: JobConfig) -> None:
    compile_model = job_config.compile.enable and "model" in job_config.compile.components
    backend = job_config.compile.backend
    if chunk := feed_forward_chunk(job_config):
        model.use_tiles(Tiling.compiled(chunk, backend) if compile_model else Tiling(chunk))
    if compile_model:
        for block in model.layers:
            block.forward = torch.compile(block.forward, backend=backend)
    if job_config.activation_checkpoint.mode != "none":
        apply_ac(
            model,
            job_config.activation_checkpoint,
            model_compile_enabled=compile_model,
            op_sac_save_list=operations_to_save() | {attention_operators("cpu")[0]},
            base_folder=job_config.job.dump_folder,
        )
        if job_config.activation_checkpoint.offload_inputs:
            cp = job_config.parallelism.context_parallel_degree
            model.offload(InputsOnHost(job_config.training.seq_len // cp))


def takes_cudnn(job_config: JobConfig, args: ModelArgs) -> bool:
    """Return whether cuDNN may attend on a ring.

    Blocks of other ranks' keys have no causal mask, and there its backward has returned NaN where
    keys do not fill the last tile. Nothing documents that it indexes 2^31 values or more.
    """
    values = most_tokens(job_config) * args.n_heads * args.head_dim
    return ring_is_aligned(job_config) and values < 2**31


def fsdp_mesh(parallel_dims: ParallelDims) -> DeviceMesh:
    """Return the one-dimensional `dp_shard x cp` mesh; of one rank, where TorchTitan has none."""
    mesh = parallel_dims.get_optional_mesh("fsdp")
    return mesh_of_this_rank(device_type, "fsdp") if mesh is None else mesh


IN_ONE_GROUP = 2**24
"""The most values of a model that is one FSDP2 group on a mesh of one rank, where nothing is sent:
hooks of groups would take as long as their blocks."""


def fsdp_groups(model: CausalLM) -> list[list[nn.Module]]:
    """List the modules that are gathered and reduced together, in order, unless all are one."""
    blocks = [[block] for block in model.layers.children()]
    if model.model_args.tie_embeddings:
        # One group: a tied weight in two would be untied (silently on torch 2.11).
        return [[model.tok_embeddings, *model.outer(), model.output], *blocks]
    return [[model.tok_embeddings], *blocks, [*model.outer(), model.output]]


def trained_fsdp_modules(model: CausalLM) -> list[FSDPModule]:
    """Return one module of each FSDP2 group that has something to train, and so reduces."""
    groups = [[model]] if fsdp_modules(model) == [model] else fsdp_groups(model)
    return [
        cast(FSDPModule, group[0])
        for group in groups
        if any(p.requires_grad for module in group for p in module.parameters())
    ]


def _apply_fsdp(model: CausalLM, mesh: DeviceMesh, dtype: torch.dtype, config: JobConfig) -> None:
    kept = model.kept_in_fp32()
    # FSDP2 would compute with them in bf16. They are small: routers, their biases.
    frozen = {
        parameter
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and canonical_name(name) in kept
    }
    policy = config.parallelism.fsdp_reshard_after_forward
    at_once = mesh.size() == 1 and sum(p.numel() for p in model.parameters()) <= IN_ONE_GROUP
    keep = config.parallelism.keep_weights_gathered or at_once
    reduce_dtype = TORCH_DTYPE_MAP[config.training.mixed_precision_reduce]
    shared: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype),
        "ignored_params": frozen,
    }
    for group in [] if at_once else fsdp_groups(model):
        # As in TorchTitan: the output layer is needed again at once.
        stays_gathered = keep or (model.output in group and policy != "always")
        reshard = policy != "never" and not stays_gathered
        fully_shard(group, reshard_after_forward=reshard, **shared)
    fully_shard(model, **shared)
    if keep:  # until `free_gathered`
        cast(FSDPModule, model).set_reshard_after_backward(False)
    if mesh.size() == 1:
        return  # there is nothing to divide by; FSDP2 would copy every gradient once more
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)


def _sum_reductions_only(model: CausalLM) -> None:
    """Have FSDP2 reduce by plain sums: gloo lacks its other choice, a pre-multiplied sum."""
    for module in fsdp_modules(model):
        module.set_force_sum_reduction_for_comms(True)


def build_optimizers(
    model_parts: list[nn.Module], config: OptimizerConfig, *others: Any
) -> OptimizersContainer:
    """Build TorchTitan's container of the optimizer that `config` names."""
    if config.name != MomentumSGD.__name__:
        return build_theirs(model_parts, config, *others)
    settings = {"betas": (config.beta1, config.beta2), "weight_decay": config.weight_decay}
    return OptimizersContainer(model_parts, MomentumSGD, {"lr": config.lr, **settings})
