"""The selfcheck's model and plain loop on the tests' own small shapes and configurations; import it
in worker processes only (it builds process groups), except for `reference_*`."""

from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn as nn

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.load import load_config
from torchtitan_dp.models.causal_lm.settings import LoRA, ModelArgs, configuration
from torchtitan_dp.models.hugging_face import on_meta
from torchtitan_dp.selfcheck import reference, small
from torchtitan_dp.selfcheck.reference import norm as norm
from torchtitan_dp.selfcheck.reference import reference_sum as reference_sum
from torchtitan_dp.selfcheck.reference import relative_error as relative_error
from torchtitan_dp.selfcheck.small import Small, Terms
from torchtitan_dp.selfcheck.small import mesh as mesh

T = 32
VOCABULARY = 37  # no mesh divides it
_LLAMA = {"model_type": "llama", "vocab_size": VOCABULARY, "max_position_embeddings": T}
_LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def llama(hidden_size: int = 24, lora: LoRA | None = None, **changes: Any) -> ModelArgs:
    """A small Llama, with changes to its `config.json`."""
    sizes = {"hidden_size": hidden_size, "intermediate_size": (8 * hidden_size // 3 + 3) // 4 * 4}
    args = ModelArgs.of(configuration({**_LLAMA, **sizes, **changes}))
    args.lora = lora
    return args


ARGS = llama()


def config(*overrides: str, degrees: tuple[int, int, int] = (1, 1, 1)) -> JobConfig:
    """A checked configuration for the mesh (dp_replicate, dp_shard, cp)."""
    names = ("data_parallel_replicate", "data_parallel_shard", "context_parallel")
    mesh = [f"--parallelism.{n}_degree={d}" for n, d in zip(names, degrees, strict=True)]
    basics = [
        *("--privacy.noise_multiplier=1", "--privacy.delta=1e-5", "--training.global_batch_size=4"),
        *("--training.mixed_precision_param=float32", f"--training.seq_len={T}"),
        "--activation_checkpoint.mode=none",
    ]
    return load_config([*basics, *mesh, *overrides], int(np.prod(degrees)))


def build(
    degrees: tuple[int, int, int] = (1, 1, 1),
    *overrides: str,
    args: ModelArgs = ARGS,
    frozen: str | None = None,
    max_grad_norm: float = 1.0,
) -> Small:
    """What `DPTrainer` builds, for a small model; names with `frozen` in them are not trained."""

    def partly_frozen(args: ModelArgs) -> nn.Module:
        model: nn.Module = on_meta(args)
        for name, parameter in model.named_parameters():
            if frozen is not None and frozen in name:
                parameter.requires_grad_(False)
        return model

    terms = Terms(config(*overrides, degrees=degrees), args)
    with mock.patch.object(small, "on_meta", partly_frozen):
        return Small(terms, torch.device("cpu"), max_grad_norm=max_grad_norm)


def data(
    samples: int = 3, seed: int = 0, args: ModelArgs = ARGS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of samples of several lengths, the first of which ends early."""
    return reference.make_samples(args, samples, seed)[:2]


def reference_model(args: ModelArgs = ARGS) -> Any:
    """The same weights in one process, without any parallelism."""
    return reference.reference_model(args)


def reference_gradients(
    model: nn.Module, tokens_NT: torch.Tensor, labels_NT: torch.Tensor
) -> list[dict[str, torch.Tensor]]:
    """Each sample's whole gradient, by name, of selfcheck's one-process loop."""
    weights_N = torch.ones(len(tokens_NT))
    return list(reference.reference_gradients(model, tokens_NT, labels_NT, weights_N))


def clipped_sum(
    built: Small, *samples: torch.Tensor, **options: Any
) -> tuple[reference.Gradient, dict[int, float]]:
    """The step's sum and the norms, of samples that are accumulated (`total`, `accumulate`)."""
    norms = built.accumulate(*samples, **options)
    return built.total(), norms
