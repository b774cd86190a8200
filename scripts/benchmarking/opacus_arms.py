"""Opacus itself on one process: the same Llama, records and AdamW, its own gradients and noise.

`hooks` is GradSampleModule with DPOptimizer, `ghost` fast gradient clipping with ghost norms: two
backward passes. Neither FSDP2 nor context parallelism; fp32.
"""

import warnings
from typing import Any, Literal

import numpy as np
import torch
import torch.nn as nn

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

from torchtitan_dp.config import JobConfig
from torchtitan_dp.data.batching import Draw
from torchtitan_dp.data.tokenizer import load_tokenizer
from torchtitan_dp.distributed.attention import use_efficient_attention
from torchtitan_dp.distributed.ring import Shard
from torchtitan_dp.models.causal_lm.model import CausalLM
from torchtitan_dp.models.hugging_face import flavor
from torchtitan_dp.models.loss import SampleLosses
from torchtitan_dp.train.spec import build_loader


class OpacusTrainer:
    """Steps a Llama as Opacus' users do: virtual steps over microbatches, noise at the last."""

    def __init__(self, config: JobConfig, kind: Literal["hooks", "ghost"]) -> None:
        """
        Raises:
            NotImplementedError: what Opacus cannot do with this model.
        """
        self._config = config
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._rng = np.random.default_rng(0)
        self._loader = build_loader(
            None,
            dp_world_size=1,
            dp_rank=0,
            tokenizer=load_tokenizer(config.model.hf_assets_path),
            job_config=config,
        )
        model = _build_model(config, self._device)
        if kind != "hooks" and model.model_args.tie_embeddings:
            raise NotImplementedError(f"Opacus {kind}: without tied embeddings only")
        max_grad_norm = config.privacy.max_grad_norm
        # Not strict: the rotary frequencies are a buffer, which Opacus suspects of mixing samples.
        self._module = (
            GradSampleModule(model, strict=False)
            if kind == "hooks"
            else GradSampleModuleFastGradientClipping(
                model, strict=False, max_grad_norm=max_grad_norm
            )
        )
        wrapper = DPOptimizer if kind == "hooks" else DPOptimizerFastGradientClipping
        self._optimizer = wrapper(
            _build_adamw(config, self._module),
            noise_multiplier=config.privacy.noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=config.training.global_batch_size,
        )
        self._losses = SampleLosses(self._module, self._device, Shard())
        self._two_passes = kind != "hooks"

    def train_step(self) -> None:
        """One step on exactly `training.global_batch_size` records."""
        records = self._config.training.global_batch_size
        population = len(self._loader.units)
        draw = self._rng.choice(population, records, replace=records > population)
        every = self._loader.deal(Draw(draw), (self._config.training.seq_len,))
        microbatches = [self._loader.microbatch(dealt) for dealt in every]
        for i, (tokens_BT, labels_BT, *_) in enumerate(microbatches):
            self._optimizer.signal_skip_step(do_skip=i + 1 < len(microbatches))
            self._optimizer.zero_grad(set_to_none=True)
            self._backward(self._losses(tokens_BT, labels_BT))
            self._optimizer.step()

    def _backward(self, loss_B: torch.Tensor) -> None:
        with warnings.catch_warnings():
            # Hooks on modules whose inputs need no gradient: the embedding's tokens.
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            if self._two_passes:
                DPTensorFastGradientClipping(self._module, self._optimizer, loss_B).backward()
            else:
                loss_B.mean().backward()


def _build_model(config: JobConfig, device: torch.device) -> CausalLM:
    args = flavor(config.model.flavor)
    args.update_from_config(config)
    with torch.device(device):
        model = CausalLM(args)
    model.init_weights(buffer_device=device)
    if device.type != "cpu":  # as for the other arms: fp32 would keep T x T scores a head
        use_efficient_attention(model)
    nn.Module.train(model)  # Opacus computes no gradients in eval mode, where ours stays
    return model


def _build_adamw(config: JobConfig, module: Any) -> torch.optim.AdamW:
    settings = config.optimizer
    return torch.optim.AdamW(
        module.parameters(),
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=settings.implementation == "fused",
        foreach=settings.implementation == "foreach",
    )
