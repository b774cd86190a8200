"""The attack on a released folder, by `transformers` alone: losses and generations of documents.

It reads the folder as anybody can who has it, with its public starting weights where there are
some: nothing of the trainer, no coin, no gradient.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from torchtitan_dp.audit.texts import TextCanary
from torchtitan_dp.data.samples.tokenizer import Tokenizer
from torchtitan_dp.models.adapter_export import ADAPTER_CONFIG_FILE

SAMPLED = 8  # generations of each prompt, at temperature 1
_ROWS = 16


def load(folder: str, base: str | None, device: torch.device) -> Any:
    """Load a released folder, of weights or of adapters for `base`, in fp32."""
    from transformers import AutoModelForCausalLM

    is_adapter = os.path.exists(os.path.join(folder, ADAPTER_CONFIG_FILE))
    place = folder
    if is_adapter:
        assert base is not None  # adapters are trained on loaded weights alone
        place = base
    model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    if is_adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder)
    return model.to(device).eval()


@torch.no_grad()
def log_likelihoods(model: Any, ids: list[np.ndarray]) -> np.ndarray:
    """Sum the logarithms of each document's token probabilities, but the first's; fp64 (N,)."""
    found = []
    for rows in _batches(ids):
        length = max(len(row) for row in rows)
        tokens_BT = torch.zeros(len(rows), length, dtype=torch.long)
        is_text_BT = torch.zeros(len(rows), length, dtype=torch.bool)
        for row, values in enumerate(rows):
            tokens_BT[row, : len(values)] = torch.from_numpy(values)
            is_text_BT[row, : len(values)] = True
        tokens_BT = tokens_BT.to(model.device)
        # Padding comes last: a causal model's earlier tokens do not see it.
        log_BTV = model(input_ids=tokens_BT).logits[:, :-1].double().log_softmax(-1)
        log_BT = log_BTV.gather(-1, tokens_BT[:, 1:, None])[..., 0]
        found.append((log_BT * is_text_BT[:, 1:].to(model.device)).sum(-1).cpu().numpy())
    return np.concatenate(found)


def scores(
    model: Any, base: Any | None, ids: list[np.ndarray], canaries: list[TextCanary]
) -> np.ndarray:
    """Score documents: how much likelier the release finds each than its starting weights do.

    Of each domain, the mean is taken away: all of its documents share a template.

    Args:
        base: the model with the starting weights, or None where there are none to compare with.

    Returns:
        fp64 (N,); a document without a finite score gets the least.
    """
    found = log_likelihoods(model, ids)
    if base is not None:
        found = found - log_likelihoods(base, ids)
    finite = np.isfinite(found)
    found = np.where(finite, found, found[finite].min() if finite.any() else 0.0)
    domains = np.array([canary.domain for canary in canaries])
    for domain in np.unique(domains):
        found[domains == domain] -= found[domains == domain].mean()
    return found


@torch.no_grad()
def extracted(
    model: Any, canaries: list[TextCanary], tokenizer: Tokenizer, *, seed: int = 0
) -> dict[str, np.ndarray]:
    """Let the model go on from each prompt, and look for the secret.

    Returns:
        "greedy", bool (N,): the most likely tokens spell it. "sampled", bool (N,): one of `SAMPLED`
        generations does.
    """
    torch.manual_seed(seed)
    greedy, sampled = [], []
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    for canary in canaries:
        prompt, whole = (
            [*bos, *_encoded(tokenizer, text)]
            for text in (canary.prompt, canary.prompt + canary.secret)
        )
        wanted = canary.secret.strip()
        tokens_1T = torch.tensor([prompt], device=model.device)
        more = max(len(whole) - len(prompt), 1) + 1
        terms = {
            "attention_mask": torch.ones_like(tokens_1T),
            "max_new_tokens": more,
            "pad_token_id": 0,
            "eos_token_id": None,
        }
        first = model.generate(tokens_1T, do_sample=False, **terms)
        some = model.generate(
            tokens_1T, do_sample=True, num_return_sequences=SAMPLED, top_k=0, **terms
        )
        spelt = [
            tokenizer.decode(row[len(prompt) :].tolist()).strip().startswith(wanted)
            for row in (*first, *some)
        ]
        greedy.append(spelt[0])
        sampled.append(any(spelt[1:]))
    return {"greedy": np.array(greedy), "sampled": np.array(sampled)}


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    ids = tokenizer.encode(text)
    assert ids is not None  # checked with the documents
    return ids.tolist()


def _batches(ids: list[np.ndarray]) -> Iterator[list[np.ndarray]]:
    for start in range(0, len(ids), _ROWS):
        yield ids[start : start + _ROWS]
