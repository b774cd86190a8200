"""Settings that cannot work together, refused in one line that names the key and the remedy."""

import os

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.combinations import check_rope, check_samples
from torchtitan_dp.config.supported import check_supported, check_values
from torchtitan_dp.gradients.methods import METHODS, automatic
from torchtitan_dp.privacy.randomized import refuse_projections


def mesh_degrees(config: JobConfig) -> tuple[int, int, int]:
    """Return the degrees of dp_replicate, dp_shard and cp."""
    parallelism = config.parallelism
    return (
        parallelism.data_parallel_replicate_degree,
        parallelism.data_parallel_shard_degree,
        parallelism.context_parallel_degree,
    )


def resolve_degrees(config: JobConfig, world_size: int) -> None:
    """Fill in `parallelism` degrees of -1 for `world_size` ranks, in place.

    `context_parallel_degree = -1` takes all ranks that the other degrees leave, and
    `data_parallel_shard_degree = -1` the rest.
    """
    parallelism = config.parallelism
    if parallelism.context_parallel_degree == -1:
        others = parallelism.data_parallel_replicate_degree * max(
            parallelism.data_parallel_shard_degree, 1
        )
        parallelism.context_parallel_degree = max(world_size // max(others, 1), 1)
    if parallelism.data_parallel_shard_degree == -1:
        others = parallelism.data_parallel_replicate_degree * parallelism.context_parallel_degree
        parallelism.data_parallel_shard_degree = max(world_size // max(others, 1), 1)


def resolve_gradient_method(config: JobConfig) -> None:
    """Replace `auto` by the method that it stands for, in place. It depends on MBS alone."""
    if config.privacy.gradient_method == "auto":
        config.privacy.gradient_method = automatic(config.training.local_batch_size)


def check(config: JobConfig, world_size: int) -> None:
    """Refuse settings that cannot work together.

    Args:
        config: with degrees resolved.
        world_size: number of processes.

    Raises:
        ValueError: one line that names the key, its value and the remedy.
    """
    check_values(config)
    _check_parallelism(config, world_size)
    if config.experimental.custom_import:
        raise ValueError(
            f"experimental.custom_import = '{config.experimental.custom_import}': a configuration "
            "runs no code here; remove it"
        )
    _check_feed_forward(config)
    checkpointing = config.activation_checkpoint
    if checkpointing.offload_inputs and checkpointing.mode != "full":
        raise ValueError(
            f"activation_checkpoint.offload_inputs = true with mode = '{checkpointing.mode}': only "
            "the inputs of whole blocks are offloaded; set activation_checkpoint.mode = 'full'"
        )
    if config.validation.enable and config.data.heldout_fraction == 0:
        raise ValueError(
            "validation.enable = true but data.heldout_fraction = 0: nothing is held out; "
            "set data.heldout_fraction (0.05, say)"
        )
    _check_store(config)
    _check_published_loss(config)
    _check_initial_weights(config)
    check_samples(config)
    _check_lora(config)
    check_rope(config)
    _check_ema(config)
    if config.data.unit_field is None and config.data.unit_sampling != "concat":
        raise ValueError(
            f"data.unit_sampling = '{config.data.unit_sampling}': without data.unit_field every "
            "unit is one record; set data.unit_field, or remove this"
        )
    if config.privacy.enable:
        _check_privacy(config)
        check_supported(config)


def _check_feed_forward(config: JobConfig) -> None:
    """Refuse tiles that cannot be, or that would keep what they should not."""
    chunk = config.training.feed_forward_chunk
    if chunk == "auto" or chunk == 0:
        return
    key = f"training.feed_forward_chunk = {chunk}"
    if not config.privacy.enable:
        return  # TorchTitan's own blocks
    if config.activation_checkpoint.mode not in ("none", "full"):
        raise ValueError(
            f"{key} with activation_checkpoint.mode = '{config.activation_checkpoint.mode}': "
            "selective checkpointing would keep the products of tiles; set the mode to 'full' (or "
            "'none'), or feed_forward_chunk to 'auto'"
        )
    method = config.privacy.gradient_method
    if METHODS[method].per_sample_layers:
        raise ValueError(
            f"{key} with privacy.gradient_method = '{method}': tiles are for microbatches of one "
            "sample; set training.local_batch_size to 1 and the method to 'microbatch', or "
            "feed_forward_chunk to 'auto'"
        )


def _check_store(config: JobConfig) -> None:
    """Refuse tokens of records in a folder that users upload."""
    store, folder = config.data.store, os.path.realpath(config.job.dump_folder)
    if store is None:
        return
    inside = os.path.realpath(os.path.expanduser(store)) + os.sep
    if inside.startswith(folder + os.sep):
        raise ValueError(
            f"data.store = '{store}': lies within job.dump_folder = '{config.job.dump_folder}', "
            "parts of which may be published; name a folder elsewhere"
        )


def _check_published_loss(config: JobConfig) -> None:
    """Refuse a held-out loss that cannot be published."""
    validation = config.validation
    epsilon, delta = validation.publish_epsilon, validation.publish_delta
    if epsilon is None:
        if delta is not None:
            raise ValueError(
                f"validation.publish_delta = {delta:g}: no held-out loss is published; set "
                "validation.publish_epsilon (1, say), or remove it"
            )
        return
    key = f"validation.publish_epsilon = {epsilon:g}"
    if not config.validation.enable:
        raise ValueError(f"{key}: no held-out loss is computed; set validation.enable = true")
    if not config.privacy.enable:
        raise ValueError(
            f"{key}: only a run with privacy publishes it; set privacy.enable = true, or remove it"
        )
    if config.privacy.sample_rate is not None:
        raise ValueError(
            f"{key}: with a public privacy.sample_rate the number of held-out units is secret, and "
            "the mean's divisor must be public; remove one of the two"
        )


def _check_lora(config: JobConfig) -> None:
    """Refuse adapters without targets; the model checks the targets' names."""
    lora = config.lora
    if lora.rank and (not lora.targets or len(set(lora.targets)) < len(lora.targets)):
        raise ValueError(
            f"lora.targets = {lora.targets}: name each target once, and at least one (wq, say); "
            "lora.rank = 0 trains all weights"
        )


def _check_ema(config: JobConfig) -> None:
    """Refuse an average that is not in fp32, or is saved while it changes."""
    if not config.ema.enable:
        return
    if config.training.dtype != "float32":
        raise ValueError(
            f"ema.enable = true with training.dtype = '{config.training.dtype}': averages are of "
            "fp32 weights; set training.dtype = 'float32' (mixed_precision_param sets the "
            "dtype of computation), or ema.enable to false"
        )
    if config.checkpoint.async_mode.lower() == "async_with_pinned_mem":
        raise ValueError(
            "ema.enable = true with checkpoint.async_mode = 'async_with_pinned_mem': validation "
            "exchanges weights and averages while they may still be copied; use 'async', or set "
            "ema.enable to false"
        )


def _check_initial_weights(config: JobConfig) -> None:
    """Refuse initial weights that would not be loaded, or not exactly."""
    checkpoint = config.checkpoint
    if checkpoint.initial_load_in_hf_quantized:
        raise ValueError(
            "checkpoint.initial_load_in_hf_quantized = true: not supported; set it to false and "
            "start from weights in bfloat16 or float32"
        )
    if checkpoint.initial_load_in_hf and not checkpoint.initial_load_model_only:
        raise ValueError(
            "checkpoint.initial_load_model_only = false: Hugging Face folders have only a model; "
            "set it to true, or checkpoint.initial_load_in_hf to false"
        )
    if not checkpoint.enable and (checkpoint.initial_load_in_hf or checkpoint.initial_load_path):
        raise ValueError(
            "checkpoint.enable = false: no initial weights are loaded either; set it to true, "
            "or remove checkpoint.initial_load_in_hf and checkpoint.initial_load_path"
        )


def _check_parallelism(config: JobConfig, world_size: int) -> None:
    """Refuse a mesh that does not fit the processes, or `seq_len`."""
    parallelism = config.parallelism
    for key in ("tensor_parallel_degree", "pipeline_parallel_degree", "expert_parallel_degree"):
        if getattr(parallelism, key) != 1:
            raise ValueError(
                f"parallelism.{key} = {getattr(parallelism, key)}: not supported; set it to 1 and "
                "use context_parallel_degree or data_parallel_shard_degree"
            )
    degrees = {
        key: getattr(parallelism, key)
        for key in (
            "data_parallel_replicate_degree",
            "data_parallel_shard_degree",
            "context_parallel_degree",
        )
    }
    product = 1
    for key, degree in degrees.items():
        if degree < 1:
            raise ValueError(f"parallelism.{key} = {degree}: must be at least 1 (or -1 for auto)")
        product *= degree
    if product != world_size:
        listed = " x ".join(f"{key} {degree}" for key, degree in degrees.items())
        raise ValueError(
            f"parallelism: {listed} = {product}, but there are {world_size} processes (NGPU x "
            "nodes); set a degree to -1 to let it follow"
        )
    cp = parallelism.context_parallel_degree
    seq_len = config.training.seq_len
    if seq_len < 1 or seq_len % (2 * cp) != 0:
        below, multiple = seq_len // (2 * cp) * 2 * cp, 2 * cp
        raise ValueError(
            f"training.seq_len = {seq_len}: must be a multiple of 2 x context_parallel_degree = "
            f"{multiple}; try {max(below, multiple)} or {max(below, 0) + multiple}"
        )
    if parallelism.context_parallel_load_balancer not in ("headtail", None):
        raise ValueError(
            "parallelism.context_parallel_load_balancer = "
            f"'{parallelism.context_parallel_load_balancer}': use 'headtail' or None"
        )


def _check_privacy(config: JobConfig) -> None:
    """Refuse settings of privacy that are missing, unknown or do not go together."""
    privacy = config.privacy
    if (privacy.target_epsilon is None) == (privacy.noise_multiplier is None):
        given = "neither is" if privacy.target_epsilon is None else "both are"
        raise ValueError(
            f"privacy.target_epsilon and privacy.noise_multiplier: {given} set; set exactly one "
            "(target_epsilon = 8.0, say, and the noise follows; on the command line, "
            "--privacy.target_epsilon None unsets the TOML's)"
        )
    if privacy.delta is None:
        raise ValueError(
            "privacy.delta is not set; choose it well below 1 / number of records (1e-5, say)"
        )
    if privacy.noise == "banded":
        if privacy.bands == "auto" and privacy.target_epsilon is None:
            raise ValueError(
                "privacy.bands = 'auto': it is chosen for privacy.target_epsilon; set that, or "
                "bands to a number (8, say)"
            )
    elif privacy.bands not in ("auto", 1):
        raise ValueError(
            f"privacy.bands = {privacy.bands}: only correlated noise has bands; set privacy.noise "
            "to 'banded', or remove the key"
        )
    refuse_projections(privacy.projections)
    built: dict[str, tuple[str, ...]] = {
        "accountant": ("rdp", "pld"),
        "gradient_method": tuple(METHODS),
    }
    for key, values in built.items():
        if (value := getattr(privacy, key)) not in values:
            raise ValueError(
                f"privacy.{key} = '{value}': unknown; use "
                + " or ".join(f"'{built_value}'" for built_value in values)
            )
    if config.training.global_batch_size < 1:
        raise ValueError(
            f"training.global_batch_size = {config.training.global_batch_size}: set the expected "
            "number of records in a step (it is also the update's divisor)"
        )
