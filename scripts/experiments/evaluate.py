"""Held-out loss of a Hugging Face folder, in total and by the token's place in its record.

A plain forward pass of the model over one record at a time, without the trainer's data path.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU
from torchtitan_dp.data.tokenizer import load_tokenizer
from torchtitan_dp.models.llama3.model import HuggingFaceAdapter, Llama, read_args

SEQ_LEN = 2048
BUCKET = 256  # tokens


def heldout_losses(weights: Path, records: Path) -> dict[str, Any]:
    """Return the mean over records of their mean loss, and the mean over tokens of each bucket.

    Args:
        weights: a folder with `config.json`, `model.safetensors` and a tokenizer.
        records: a folder of texts; of each, the first `SEQ_LEN` tokens are predicted.
    """
    model, tokenizer = load(weights), load_tokenizer(str(weights))
    assert tokenizer.bos_id is not None
    assert tokenizer.eos_id is not None
    sums, counts = np.zeros(SEQ_LEN), np.zeros(SEQ_LEN)
    means, read = [], 0
    for path in sorted(records.rglob("*.py")):
        text = tokenizer.encode(path.read_text("utf-8"))
        assert text is not None
        ids = torch.tensor([tokenizer.bos_id, *text, tokenizer.eos_id][: SEQ_LEN + 1])
        losses = token_losses(model, ids).numpy()
        read += len(tokenizer.decode(ids[1:].tolist()).encode())
        sums[: len(losses)] += losses
        counts[: len(losses)] += 1
        means.append(float(losses.mean()))
    return {
        "loss": float(np.mean(means)),
        "by_position": [round(x, 5) for x in by_bucket(sums, counts)],
        "nats_per_byte": float(sums.sum() / read),
        "records": len(means),
    }


def by_bucket(sums: np.ndarray, counts: np.ndarray) -> list[float]:
    """Return the mean over the tokens of each bucket of positions."""
    total, number = sums.reshape(-1, BUCKET).sum(axis=1), counts.reshape(-1, BUCKET).sum(axis=1)
    return (total / np.maximum(number, 1)).tolist()  # type: ignore[no-any-return]


@torch.no_grad()
def token_losses(model: Llama, ids_T: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each id after the first, fp32."""
    logits_TV = model(ids_T[None, :-1])[0]
    return F.cross_entropy(logits_TV.float(), ids_T[1:], reduction="none")


def load(folder: Path) -> Llama:
    """Build the model of a Hugging Face folder, with its weights."""
    path = folder / "config.json"
    args = read_args(json.loads(path.read_text()), str(path), "model.hf_assets_path")
    args.max_seq_len = SEQ_LEN
    model = Llama(args)
    model.init_weights()
    state = HuggingFaceAdapter(args, None).from_hf(load_file(str(folder / "model.safetensors")))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not missing, missing
    assert not unexpected, unexpected
    return model.eval()
