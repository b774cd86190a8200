"""Checks that the model, its files and its tokenizer fit together, before anything runs."""

from torchtitan_dp.checkpoint.start import Start
from torchtitan_dp.config import JobConfig
from torchtitan_dp.data.samples.tokenizer import load_tokenizer
from torchtitan_dp.distributed.cpu import has_accelerator
from torchtitan_dp.models.families import ModelArgs, on_meta
from torchtitan_dp.models.hugging_face import origin, shape
from torchtitan_dp.models.parameters import trainable_parameters
from torchtitan_dp.preflight.model_files import check_files
from torchtitan_dp.privacy.clip_policy import clip_policy


def check_model(config: JobConfig, start: Start) -> ModelArgs:
    """Return the shape of the model that a run trains.

    Args:
        start: from `decide_start`.

    Raises:
        ValueError: one line for the user: the model is of no family; its files do not fit it; its
            tokenizer has ids outside the vocabulary (a record with one would end the run); no
            kernel of this machine computes its attention; it lacks a layer that is to have
            adapters; or clipping groups do not divide its parameters.
    """
    args = shape(config)
    on_meta(args)  # refuses unknown targets of adapters
    _check_attention(config, args)
    check_clipping(config, args)
    check_files(config, args, start)
    tokens = load_tokenizer(config.model.hf_assets_path).get_vocab_size()
    if tokens > args.vocab_size:
        raise ValueError(
            f"model.hf_assets_path = '{config.model.hf_assets_path}': its tokenizer has {tokens} "
            f"tokens, more than the {args.vocab_size} of {origin(config)}; use the model's own "
            "tokenizer"
        )
    return args


def check_clipping(config: JobConfig, args: ModelArgs) -> None:
    """Refuse groups that do not divide the model's parameters.

    Raises:
        ValueError: one line for the user.
    """
    privacy = config.privacy
    if not privacy.clipping_groups:
        return
    names = trainable_parameters(on_meta(args))
    try:
        clip_policy(names, privacy)
    except ValueError as mistake:
        where = f"privacy.clipping_groups = {privacy.clipping_groups}"
        raise ValueError(f"{where}: {mistake}") from None


def _check_attention(config: JobConfig, args: ModelArgs) -> None:
    """Refuse a ring of fp32 with grouped queries on an accelerator: no kernel of PyTorch has it.

    Flash and cuDNN take 16 bits only, and the memory-efficient kernel no grouped queries.
    """
    cp, dtype = (
        config.parallelism.context_parallel_degree,
        config.training.mixed_precision_param,
    )
    grouped = args.n_kv_heads is not None and args.n_kv_heads != args.n_heads
    if cp > 1 and dtype == "float32" and grouped and has_accelerator():
        raise ValueError(
            f"training.mixed_precision_param = '{dtype}': with context_parallel_degree = {cp} and "
            f"{args.n_heads} heads that share {args.n_kv_heads} keys no kernel for this device "
            "attends in 32 bits; set it to 'bfloat16', or parallelism.context_parallel_degree to 1"
        )
