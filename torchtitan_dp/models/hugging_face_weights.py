"""The export of a model, or of its adapters, as a folder of Hugging Face's files.

PEFT, Hugging Face's library of adapters, stores LoRA's A and B apart from the model, under the
model's names in `transformers`, beside an `adapter_config.json` with r, alpha and targets.
"""

import json
import os
import shutil
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP

from torchtitan_dp.base.process import write_atomically
from torchtitan_dp.config import JobConfig
from torchtitan_dp.models.causal_lm.model import CausalLM, HuggingFaceAdapter
from torchtitan_dp.models.causal_lm.settings import PREFIX, LoRA, ModelArgs
from torchtitan_dp.models.hugging_face import (
    CONFIG_FILE,
    export_settings,
    shape,
    without_local_paths,
)
from torchtitan_dp.models.lora import FACTORS, is_adapter, merged, without_adapters
from torchtitan_dp.models.parameters import canonical_name
from torchtitan_dp.models.weight_files import ADAPTER_FILE, INDEX_FILE

EXPORT_FOLDER = "hf"
ADAPTER_CONFIG_FILE = "adapter_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
SHARD_BYTES = 2 * 2**30
_PEFT_NAMES = dict(zip(FACTORS, ("lora_A", "lora_B"), strict=True))
_BESIDE_EXPORT = f".{EXPORT_FOLDER}.partial", f".{EXPORT_FOLDER}.old"
"""Names that no owner gives to a copy: both are deleted."""


def export(model: CausalLM, config: JobConfig, beside: Mapping[str, bytes] | None = None) -> str:
    """Write `<job.dump_folder>/hf` for `transformers` or, of adapters, PEFT; return its path.

    Its files are those of `write_folder`, and those `beside`, by name, readable by the owner only.
    A complete new folder replaces an older one. Collective: parameters are gathered one at a time;
    rank 0 writes, with at most a shard of `SHARD_BYTES` or all adapters in memory.
    """
    writes = not dist.is_initialized() or dist.get_rank() == 0
    target = os.path.join(config.job.dump_folder, EXPORT_FOLDER)
    partial, old = (os.path.join(config.job.dump_folder, name) for name in _BESIDE_EXPORT)
    if writes:
        shutil.rmtree(partial, ignore_errors=True)
        os.makedirs(partial, mode=0o700)
    write_folder(model, config, partial if writes else None, merge=config.lora.export == "merged")
    if writes:
        for name, content in (beside or {}).items():
            write_atomically(os.path.join(partial, name), content)
        shutil.rmtree(old, ignore_errors=True)
        if os.path.exists(target):
            os.rename(target, old)
        os.rename(partial, target)
        shutil.rmtree(old, ignore_errors=True)
    return target


def write_folder(
    model: CausalLM,
    config: JobConfig,
    folder: str | None,
    *,
    merge: bool = False,
    base_model: str | None = None,
) -> None:
    """Write what was trained and the tokenizer's files into `folder`, None on ranks that do not
    write.

    What was trained are weights and `config.json`; with `[lora]`, unless they are to be merged into
    the weights, adapters in fp32 and `adapter_config.json`, with the public name `base_model` if
    given. Collective, as `export` is.

    Raises:
        ValueError: one line, on the rank that writes; a weight is not finite in the export's dtype.

    Guarantee:
        No JSON file of the folder has a path of this machine as a value (`without_local_paths`).
    """
    args = shape(config)
    if folder is not None:
        for name, content in tokenizer_files(config).items():
            write_atomically(os.path.join(folder, name), content)
    adapters = None if merge else args.lora
    settings = export_settings(config, args)
    if folder is not None and adapters is None:
        _write_json(os.path.join(folder, CONFIG_FILE), settings)
    if adapters is not None:
        _write_adapters(model, adapters, base_model, folder)
        return
    dtype = TORCH_DTYPE_MAP[next(settings[k] for k in ("dtype", "torch_dtype") if k in settings)]
    _save_weights(model, args, dtype, folder)


def tokenizer_files(config: JobConfig) -> dict[str, bytes]:
    """Return the tokenizer's files in `model.hf_assets_path`, by name, without local paths.

    Raises:
        ValueError: one of them is not JSON.
    """
    folder, found = config.model.hf_assets_path, {}
    for name in TOKENIZER_FILES:
        path = os.path.join(folder, name)
        if not folder or not os.path.isfile(path):
            continue
        with open(path, "rb") as file:
            found[name] = file.read()
        if not name.endswith(".json") or name == "tokenizer.json":  # tokens are no paths
            continue
        try:
            found[name] = _json(without_local_paths(json.loads(found[name])))
        except ValueError as error:
            raise ValueError(
                f"model.hf_assets_path = '{folder}': {name} is broken ({error}); download it again"
            ) from error
    return found


@torch.no_grad()
def _write_adapters(model: CausalLM, lora: LoRA, base: str | None, folder: str | None) -> None:
    """Write LoRA's factors, fp32, and their `adapter_config.json` into `folder`. Collective over
    the FSDP mesh: each factor is gathered."""
    state_dict: dict[str, Any] = get_model_state_dict(model)
    tensors: dict[str, Tensor] = {}
    for name in filter(is_adapter, state_dict):  # under PEFT's names
        layer, _, factor = name.removesuffix(".weight").rpartition(".")
        theirs = f"base_model.model.{layer.removeprefix(PREFIX)}.{_PEFT_NAMES[factor]}.weight"
        tensors[theirs] = _whole(state_dict[name]).to("cpu", torch.float32).contiguous()
    if folder is None:
        return
    _save(tensors, os.path.join(folder, ADAPTER_FILE))
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        **({} if base is None else {"base_model_name_or_path": base}),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,  # alpha / r, not alpha / sqrt(r)
        "inference_mode": True,
    }
    _write_json(os.path.join(folder, ADAPTER_CONFIG_FILE), settings)


@torch.no_grad()
def _save_weights(model: CausalLM, args: ModelArgs, dtype: torch.dtype, folder: str | None) -> None:
    """Write shards of safetensors into `folder`, and their index; what is no parameter, and what
    transformers keeps in fp32, is not narrowed to `dtype`."""
    names = map(canonical_name, dict(model.named_parameters(remove_duplicate=False)))
    narrowed = {*names} - model.kept_in_fp32()
    adapter, weight_map, total = HuggingFaceAdapter(args, None), {}, 0
    state_dict: dict[str, Any] = get_model_state_dict(model)
    whole_model: dict[str, Any] = without_adapters(state_dict, *adapter.tied)
    sizes = {n: torch.empty(v.shape, dtype=dtype, device="meta") for n, v in whole_model.items()}
    shards = split_torch_state_dict_into_shards(sizes, max_shard_size=SHARD_BYTES)
    for name, parameters in shards.filename_to_tensors.items():
        tensors: dict[str, Tensor] = {}
        for parameter in parameters:
            whole, layer = _whole(state_dict[parameter]), parameter.removesuffix(".weight")
            if args.lora is not None and f"{layer}.{FACTORS[0]}.weight" in state_dict:
                a, b = (_whole(state_dict[f"{layer}.{factor}.weight"]) for factor in FACTORS)
                whole = merged(whole, a, b, args.lora.scaling)
            if folder is not None:
                stored = dtype if parameter in narrowed else whole.dtype
                for key, tensor in adapter.to_hf({parameter: whole}).items():
                    tensors[key] = tensor.to("cpu", stored).contiguous()
        if folder is None:
            continue
        _save(tensors, os.path.join(folder, name))
        weight_map.update(dict.fromkeys(tensors, name))
        total += sum(tensor.nbytes for tensor in tensors.values())
    if folder is not None and shards.is_sharded:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(os.path.join(folder, INDEX_FILE), index)


def _save(tensors: dict[str, Tensor], path: str) -> None:
    """Write tensors; raise ValueError, one line, if one has a NaN or an infinity."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ValueError(
                f"{name} is not finite in {str(tensor.dtype).removeprefix('torch.')}, so no model "
                "is written: train again with a lower optimizer.lr, from an earlier checkpoint"
            )
    save_file(tensors, path, metadata={"format": "pt"})
    os.chmod(path, 0o600)


def _write_json(path: str, content: dict[str, Any]) -> None:
    write_atomically(path, _json(content))


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
