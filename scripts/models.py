"""The table of docs/models.md: models of transformers, and the longest samples that are predicted.

    python scripts/models.py [--only mistral]

Plans `train_configs/any_lora.toml` for the public `config.json` of each, on one and on eight GPUs
of 80 GB; nothing is downloaded, nothing measured. A test compares the page.
"""

import argparse
import json
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan_dp.config.derived import mesh_degrees
from torchtitan_dp.config.load import load_config
from torchtitan_dp.models.hugging_face import parameter_count, shape, without_lora
from torchtitan_dp.plan.memory import LONGEST, communicators, limit_bytes
from torchtitan_dp.plan.prediction import search

RANKS, GPU_GIB = (1, 8), 80.0
HEAD = ["model", "type", "parameters", "trained window", "sliding windows"]
HEAD += [f"{ranks} GPU{'s' * (ranks > 1)}" for ranks in RANKS]
ANY_LORA = Path(__file__).resolve().parents[1] / "train_configs" / "any_lora.toml"
GEMMA3 = dict(model_type="gemma3_text", sliding_window=1024, _sliding_window_pattern=6)
GEMMA3 |= dict(rope_theta=1e6, rope_local_base_freq=1e4, max_position_embeddings=131072)
GEMMA3 |= dict(rope_scaling=dict(factor=8.0, rope_type="linear"), tie_word_embeddings=True)
LONGROPE = dict(type="longrope", short_factor=[1.0] * 48, long_factor=[1.0] * 48)  # any values
YARN = dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False)
YARN |= dict(original_max_position_embeddings=4096)


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers")
SIZES += ("num_attention_heads", "num_key_value_heads", "vocab_size")


def _sizes(*sizes: int) -> dict[str, Any]:
    return dict(zip(SIZES, sizes, strict=True))


CONFIGS: dict[str, dict[str, Any]] = {
    "google/gemma-3-4b-it (its text model)": GEMMA3
    | _sizes(2560, 10240, 34, 8, 4, 262208)
    | dict(head_dim=256, query_pre_attn_scalar=256),
    "google/medgemma-27b-text-it": GEMMA3
    | _sizes(5376, 21504, 62, 32, 16, 262144)
    | dict(head_dim=128, query_pre_attn_scalar=168),
    "mistralai/Mistral-7B-v0.1": _sizes(4096, 14336, 32, 32, 8, 32000)
    | dict(model_type="mistral", sliding_window=4096, max_position_embeddings=32768),
    "microsoft/Phi-4-mini-instruct": _sizes(3072, 8192, 32, 24, 8, 200064)
    | dict(model_type="phi3", sliding_window=262144, max_position_embeddings=131072)
    | dict(original_max_position_embeddings=4096, partial_rotary_factor=0.75)
    | dict(rope_scaling=LONGROPE, tie_word_embeddings=True, pad_token_id=199999),
    "Qwen/Qwen2.5-7B": _sizes(3584, 18944, 28, 28, 4, 152064)
    | dict(model_type="qwen2", use_sliding_window=False, sliding_window=131072)
    | dict(max_window_layers=28, max_position_embeddings=131072, rope_theta=1e6),
    "openai/gpt-oss-20b (in bf16)": _sizes(2880, 2880, 24, 64, 8, 201088)
    | dict(model_type="gpt_oss", head_dim=64, num_local_experts=32, num_experts_per_tok=4)
    | dict(sliding_window=128, max_position_embeddings=131072, rope_theta=150000)
    | dict(rope_scaling=YARN, attention_bias=True, initial_context_length=4096),
}
"""The values of each `config.json` that decide on sizes and attention, by public name."""


def arguments(settings: dict[str, Any], folder: Path) -> list[str]:
    """Write a `config.json` into a folder; the command line of its model with adapters."""
    (folder / "config.json").write_text(json.dumps(settings))
    no_weights = "--checkpoint.no-initial_load_in_hf"
    return ["--job.config_file", str(ANY_LORA), "--model.hf_assets_path", str(folder), no_weights]


def facts(name: str, given: list[str]) -> list[str]:
    """The cells of a model that need no plan."""
    args = shape(load_config(given, 1))
    windows = [window for window in args.windows() if window and window < args.max_seq_len]
    few = f"{windows[0]:,} in {len(windows)} of {args.n_layers} layers" if windows else "–"
    count = f"{parameter_count(without_lora(args)):,}"
    return [f"`{name}`", f"`{args.settings['model_type']}`", count, f"{args.max_seq_len:,}", few]


def plans(given: list[str]) -> list[str]:
    """The longest samples of a model, each sought as the plan does, in a process of its own."""
    found = []
    for ranks in RANKS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            length = pool.apply(_longest, (given, ranks))
        found.append(f"{length or 0:,}{' or more' if length == LONGEST else ''}")
    return found


def _longest(given: list[str], ranks: int) -> int | None:
    config = load_config(given, ranks)
    limit = limit_bytes(GPU_GIB, communicators(mesh_degrees(config)))
    return search(config, shape(config), ranks, config.activation_checkpoint.mode, limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="models whose names have this part")
    only = parser.parse_args().only.lower()
    rows = [HEAD, ["---"] * len(HEAD)]
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in CONFIGS.items():
            if only in name.lower():
                given = arguments(settings, Path(folder))
                rows.append(facts(name, given) + plans(given))
    print("\n".join(f"| {' | '.join(cells)} |" for cells in rows))


if __name__ == "__main__":
    main()
