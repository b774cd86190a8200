"""Checks that the model, its files and its tokenizer fit together, before anything runs."""

import json
import os

from safetensors import SafetensorError, safe_open

from torchtitan_dp.checkpoint.start import Start, Weights, check_start
from torchtitan_dp.config import JobConfig
from torchtitan_dp.data.samples.tokenizer import from_hub, load_tokenizer
from torchtitan_dp.distributed.cpu import has_accelerator
from torchtitan_dp.models.adapter_export import ADAPTER_FILE
from torchtitan_dp.models.families import ModelArgs, family_of, on_meta
from torchtitan_dp.models.hugging_face import CONFIG_FILE, origin, shape
from torchtitan_dp.models.hugging_face_weights import EXPORT_FOLDER, INDEX_FILE, tokenizer_files
from torchtitan_dp.models.parameters import trainable_parameters
from torchtitan_dp.privacy.clipping import clip_policy

_FLOATS = ("F32", "BF16", "F16")


def check_model(config: JobConfig, start: Start) -> ModelArgs:
    """Return the shape of the model that a run trains.

    Raises:
        ValueError: one line for the user: the model is of no family; its files do not fit it; its
            tokenizer has ids outside the vocabulary (a record with one would end the run); no
            kernel of this machine computes its attention; it lacks a layer that is to have
            adapters; or clipping groups do not divide its parameters.
    """
    assets = config.model.hf_assets_path
    if start.resumes and assets and not os.path.isdir(assets):  # the shape would be another one
        raise ValueError(
            f"model.hf_assets_path = '{assets}': no such folder; name the one that this run was "
            "started with"
        )
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
    """Refuse, by ValueError, groups that do not divide the model's parameters."""
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


def check_files(config: JobConfig, args: ModelArgs, start: Start) -> None:
    """Refuse, by ValueError, weights that cannot be loaded and an export that cannot be written."""
    if config.checkpoint.last_save_in_hf:
        _check_target(os.path.join(config.job.dump_folder, EXPORT_FOLDER), config)
        tokenizer_files(config)
    if not start.loads:
        return
    if not start.place or not os.path.isdir(start.place):
        remedy = from_hub(start.place) or "name the one with initial weights"
        raise ValueError(f"{start.key} = '{start.place}': no such folder; {remedy}")
    if start.weights is Weights.INITIAL_HF:
        _check_weights(f"{start.key} = '{start.place}'", start.place, args)
    else:
        check_start(start, on_meta(args).state_dict(), origin(config))


def _check_target(target: str, config: JobConfig) -> None:
    for key, used in (
        ("model.hf_assets_path", config.model.hf_assets_path),
        ("checkpoint.initial_load_path", config.checkpoint.initial_load_path),
        ("checkpoint.folder", os.path.join(config.job.dump_folder, config.checkpoint.folder)),
    ):
        inside = os.path.realpath(used or "/") + os.sep
        if inside.startswith(os.path.realpath(target) + os.sep):
            raise ValueError(
                f"{key} = '{used}': checkpoint.last_save_in_hf would replace it by its own "
                f"'{target}'; use another job.dump_folder, or move it"
            )


def _check_weights(problem: str, folder: str, args: ModelArgs) -> None:
    found = {}
    for path in _safetensors(problem, folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  not a mapping
                    entry = file.get_slice(name)
                    found[name] = (tuple(entry.get_shape()), entry.get_dtype())
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{problem}: {path} is broken ({error}); download it again") from error
    expected = family_of(args).adapter(args, None).to_hf(on_meta(args).state_dict())
    for name, tensor in expected.items():
        if name not in found:
            raise ValueError(
                f"{problem}: {name} is in none of its *.safetensors; take all files of one model"
            )
        size, dtype = found[name]
        if size != tuple(tensor.shape):
            raise ValueError(
                f"{problem}: {name} has shape {list(size)}, but the model's is "
                f"{list(tensor.shape)}; take weights and {CONFIG_FILE} from one model"
            )
        if dtype not in _FLOATS:
            raise ValueError(
                f"{problem}: {name} is {dtype}; quantized weights cannot be trained, take those in "
                "bfloat16 or float32"
            )


def _safetensors(problem: str, folder: str) -> list[str]:
    """List the files of weights, all that the index names among them."""
    names = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    if names == [ADAPTER_FILE]:
        raise ValueError(
            f"{problem}: it is an adapter, not a whole model; release its run with --merged and "
            "name that folder"
        )
    if not names:
        raise ValueError(f"{problem}: it has no *.safetensors; download the model's weights")
    index = os.path.join(folder, INDEX_FILE)
    if os.path.exists(index):
        try:
            with open(index, encoding="utf-8") as file:
                listed = set(json.load(file)["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{problem}: its {INDEX_FILE} is broken; download it again") from error
        if missing := sorted(listed - set(names)):
            raise ValueError(
                f"{problem}: {missing[0]}, which its {INDEX_FILE} names, is missing; download it"
            )
    return [os.path.join(folder, name) for name in names]
