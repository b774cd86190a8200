"""Facts that follow from a configuration: mesh, samples, needs of its method, terms in words."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torchtitan_dp.config import ALL_LINEAR, JobConfig
from torchtitan_dp.privacy.settings import Privacy

ALL, AUTO = "all weights", "auto"
CONFIG_FILE = "config.json"

LLAMAS, TRANSFORMERS = "llama3", "transformers"
"""`model.name`: of Llamas by `model.flavor`, TorchTitan's default; of models by `config.json`."""

# The keys of `mesh_degrees` in [parallelism].
DEGREES = "data_parallel_replicate_degree", "data_parallel_shard_degree", "context_parallel_degree"

# torch.compile's default limit on graphs of one function.
MOST_LENGTHS = 8

FEED_FORWARD_CHUNK = 8192
"""Tokens in a tile of the feed-forward by default: enough that products outweigh the sums of weight
gradients, which each tile reads and writes once."""

# The keys in a tile of cuDNN's attention. Its backward has returned NaN on tiles that were filled
# in part (https://github.com/pytorch/pytorch/issues/196678); it refuses a single key.
ALIGNED_TOKENS = 128


def mesh_degrees(config: JobConfig) -> tuple[int, int, int]:
    """Return the degrees of dp_replicate, dp_shard and cp."""
    replicate, shard, cp = (getattr(config.parallelism, key) for key in DEGREES)
    return replicate, shard, cp


def config_file(config: JobConfig) -> tuple[str, str] | None:
    """Find the `config.json` with the shape, and the key of its folder; None if there is none."""
    folders = [(config.model.hf_assets_path, "model.hf_assets_path")]
    if config.checkpoint.initial_load_in_hf:
        folders.append(weights_folder(config))
    found = ((os.path.join(folder, CONFIG_FILE), key) for folder, key in folders if folder)
    return next((one for one in found if os.path.isfile(one[0])), None)


def resolve(config: JobConfig, world_size: int) -> None:
    """Replace degrees of -1, `auto`, and a default name of the model, by what they stand for, in
    place.

    cp takes all of `world_size` ranks that the other degrees leave (`auto`: as many as share a
    sample in equal parts), then dp_shard takes the rest. The gradient method depends on MBS alone.
    Most units are longer than one sample, so over many draws all of a unit is read: by windows,
    or, where samples lie around answers, by random records.
    """
    parallelism, (replicate, shard, cp) = config.parallelism, mesh_degrees(config)
    if cp in (-1, AUTO):
        left = max(world_size // max(replicate * max(shard, 1), 1), 1)
        length, degrees = config.training.seq_len, [n for n in range(1, left + 1) if left % n == 0]
        equal = [n for n in degrees if length % (2 * n) == 0]
        cp = equal[-1] if cp == AUTO and equal else left
    if shard == -1:
        shard = max(world_size // max(replicate * cp, 1), 1)
    parallelism.context_parallel_degree, parallelism.data_parallel_shard_degree = cp, shard
    if config.model.name == LLAMAS and config_file(config) is not None:
        config.model.name = TRANSFORMERS
    if config.privacy.gradient_method == "auto":
        config.privacy.gradient_method = automatic(config.training.local_batch_size)
    data, has_answers = config.data, _has_answers(config)
    is_grouped = data.unit_field is not None
    if data.unit_sampling == "auto":
        data.unit_sampling = "random" if is_grouped and has_answers else "concat"
    if data.long_records == "auto":
        data.long_records = "window" if is_grouped and not has_answers else "head"


def _has_answers(config: JobConfig) -> bool:
    return config.data.prompt_field is not None or config.data.messages_field is not None


def record_paths(config: JobConfig) -> list[str]:
    """Return the paths of the records, one or several."""
    paths = config.training.dataset_path or []
    return [paths] if isinstance(paths, str) else paths


def unit_word(config: JobConfig) -> str:
    """Return the one-word name of the privacy unit, which is drawn, clipped and protected."""
    return "record" if config.data.unit_field is None else "unit"


def never_trained(config: JobConfig) -> str | None:
    """Describe the part of long records or units that no sample covers; None if there is none."""
    data = config.data
    takes_all = data.unit_field is not None and data.unit_sampling == "concat"
    has_answers = _has_answers(config)
    if data.long_records != "head" or (has_answers and not takes_all):
        return None  # with answers, a sample of one record lies around the answer
    remedy = "data.long_records = 'window' samples a new part at each draw"
    if has_answers:
        remedy = "data.unit_sampling = 'random' samples a new record at each draw"
    return (
        f"only the first {config.training.seq_len:,} tokens of a "
        f"{'unit' if takes_all else 'record'} are trained on; {remedy}"
    )


def heldout_units(heldout: int, steps: int, at_once: int) -> int:
    """Return how many held-out units an evaluation of `steps` (-1: all) times `at_once` takes."""
    return heldout if steps < 0 else min(heldout, steps * at_once)


def privacy_unit(config: JobConfig) -> str:
    """Return the unit's name in `privacy.json`, which follows "one"."""
    field, others = config.data.unit_field, sorted(config.data.not_owners)
    if field is None or isinstance(field, str):
        return "record" if field is None else f"unit of data.unit_field '{field}'"
    # Runs on others compose with none of these: who is protected differs.
    named = hashlib.sha256(repr(others).encode()).hexdigest()[:12]
    without = f" without {len(others)} data.not_owners ({named})" if others else ""
    return f"unit of owners by data.unit_field {', '.join(map(repr, field))}{without}"


def targets(config: JobConfig) -> str:
    """Describe the target tokens of a record, as in `privacy.json`."""
    data = config.data
    if data.messages_field is not None:
        return f"the assistant's turns in data.messages_field '{data.messages_field}'"
    if data.prompt_field is not None:
        return (
            f"the answer in data.text_field '{data.text_field}', after the prompt in "
            f"data.prompt_field '{data.prompt_field}'"
        )
    return "every token"


def weights_folder(config: JobConfig) -> tuple[str, str]:
    """Return the folder of initial weights, if any are loaded, and its key."""
    if config.checkpoint.initial_load_path:
        return config.checkpoint.initial_load_path, "checkpoint.initial_load_path"
    return config.model.hf_assets_path, "model.hf_assets_path"


def trained(config: JobConfig) -> str:
    """Describe the trained weights, for `privacy.json`, cards and messages."""
    lora = config.lora
    if not lora.rank:
        return ALL
    layers = ", ".join(sorted(lora.targets))
    if lora.targets == [ALL_LINEAR]:
        layers = "all linear layers of the blocks"
    factors = ", B alone" * lora.freeze_a
    return f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}{factors}, on {layers}"


def feed_forward_chunk(config: JobConfig) -> int:
    """Return the number of tokens in a tile of the feed-forward; 0 for none.

    Below `FEED_FORWARD_CHUNK` tokens a rank there is little to gain, and without checkpointing the
    first product of each tile would be computed twice.
    """
    chunk = config.training.feed_forward_chunk
    if chunk != "auto":
        return chunk
    longest = config.training.seq_len // config.parallelism.context_parallel_degree
    pays = config.activation_checkpoint.mode == "full" and longest > FEED_FORWARD_CHUNK
    return FEED_FORWARD_CHUNK if trains_one_sample(config) and pays else 0


def trains_one_sample(config: JobConfig) -> bool:
    """Return whether each backward pass is over one sample."""
    if not config.privacy.enable:
        return config.training.local_batch_size == 1
    return not METHODS[config.privacy.gradient_method].per_sample_layers


def ladder(config: JobConfig) -> tuple[int, ...]:
    """List the lengths that samples are padded to, rising; the last is `training.seq_len` = T.

    Powers of two times 2 x context_parallel_degree, of which a ring needs multiples, from T / 128
    on; on an accelerator a ring has none below 256 x context_parallel_degree (`ALIGNED_TOKENS`).
    """
    seq_len, cp = config.training.seq_len, config.parallelism.context_parallel_degree
    rung, shortest = 2 * cp, 2 * cp
    if cp > 1:
        from torchtitan_dp.distributed.devices import has_accelerator

        shortest = 2 * cp * ALIGNED_TOKENS if has_accelerator() else shortest
    lengths = [seq_len]
    if config.data.length_buckets:
        powers = (rung << power for power in range((seq_len // rung).bit_length()))
        lengths = [length for length in powers if shortest <= length < seq_len] + lengths
    return tuple(lengths[-MOST_LENGTHS:])


def most_tokens(config: JobConfig) -> int:
    """Return the most tokens that a rank computes at once: a microbatch of the longest samples,
    which validation takes whole under any gradient method."""
    training = config.training
    microbatch = training.local_batch_size * training.seq_len
    return microbatch // config.parallelism.context_parallel_degree


def ring_is_aligned(config: JobConfig) -> bool:
    """Return whether each of a rank's two parts of every sample is whole tiles of attention."""
    whole = 2 * config.parallelism.context_parallel_degree * ALIGNED_TOKENS
    return all(length % whole == 0 for length in ladder(config))


@dataclass(frozen=True)
class Method:
    """The needs of a gradient method, which only `gradients.step.BUILD` knows by its name, too."""

    chosen_for: str
    """When to choose it; `docs/methods.md` has the figures."""

    per_sample_layers: bool
    """Whether the model's layers must first be converted by `layers.per_sample_layers`. They start
    collectives within backward, so they are not compiled."""

    backward_passes: Callable[[Privacy], int] = lambda _: 1
    """How often backward runs over a microbatch."""

    averages_windows: bool = False
    """Whether several backward passes can make up one sample's gradient (`GradientMethod.hold`)."""

    estimates_norms: bool = False  # from `projections`

    smallest_layer: Callable[[Privacy], tuple[int, int, int]] = lambda _: (1, 1, 1)
    """(T, P, D): the tokens, rows and columns of the smallest layer on which the method differs."""


def _ghost_passes(privacy: Privacy) -> int:
    return 2 if privacy.ghost_passes == "two" else 1


METHODS: dict[str, Method] = {
    "microbatch": Method(
        "one sample per microbatch; its reduced gradient is already per-sample",
        per_sample_layers=False,
        averages_windows=True,
    ),
    # Per-sample layers hand over what they have, or start collectives, within backward.
    "grad_sample": Method(
        "several samples per microbatch; for per-sample gradients that fit in memory",
        per_sample_layers=True,
    ),
    "ghost": Method(
        "norms without per-sample gradients; for short contexts and little memory",
        per_sample_layers=True,
        backward_passes=_ghost_passes,
    ),
    "randomized": Method(
        "estimated norms; for long contexts, several samples and little memory",
        per_sample_layers=True,
        backward_passes=_ghost_passes,
        estimates_norms=True,
        # Square, and large enough: 3 k n < min(2 n^2, n^2).
        smallest_layer=lambda privacy: (4 * privacy.projections,) * 3,
    ),
}


def automatic(samples: int) -> Literal["microbatch", "grad_sample"]:
    """Return the method of `auto`, which depends on the microbatch size alone."""
    return "microbatch" if samples == 1 else "grad_sample"
