"""Only answers are learned: losses and gradients are a hand-made loop's, each with its own divisor.

Rows 6 and 18. The loop knows bytes and models, and nothing of samples: a record's loss is the mean
of -log p over the bytes of its own answer and its end mark.
"""

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.stores import store_of
from tests.processes.ranks import on_ranks
from torchtitan_dp.data.samples import Samples

BOS, EOS = 256, 257
# Answers of other sizes and places: in the first rank's part of a sample alone, in the last one's,
# longer than a sample, and none.
RECORDS = (
    ("p", "ab"),
    ("a prompt of 24 letters, ", "b"),
    ("p", "an answer that goes on for longer than a sample"),
    ("a prompt", ""),
    ("a prompt that is longer than a sample: ", "seen"),
    (7, "malformed"),
    ("half of it is", " not a prompt"),
)


def by_hand(model: torch.nn.Module, T: int) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Each record's loss and gradient."""
    losses, gradients = [], []
    for prompt, answer in RECORDS:
        model.zero_grad()
        loss = torch.zeros(())
        if isinstance(prompt, str) and answer:
            ids = [BOS, *prompt.encode(), *answer.encode(), EOS]
            first = 1 + len(prompt)
            start = max(min(first - (T + 1) // 4, len(ids) - T - 1), 0)
            window = ids[start : start + T + 1]
            log_p_TV = model(torch.tensor([window[:-1]]))[0].log_softmax(-1)
            answered = range(first - start, len(window))
            loss = -sum(log_p_TV[i - 1, window[i]] for i in answered) / len(answered)
            loss.backward()
        losses.append(loss.item())
        gradients.append(
            {
                name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                for name, p in model.named_parameters()
            }
        )
    return losses, gradients


def errors(degrees: tuple[int, int, int], method: str, samples: int) -> tuple[float, float]:
    """(error of the clipped sum, largest error of a loss) on this rank."""
    from tests import build

    args = dataclasses.replace(build.ARGS, vocab_size=258)
    with tempfile.TemporaryDirectory() as place:
        rows = [{"prompt": prompt, "text": answer} for prompt, answer in RECORDS]
        store = store_of(rows, Path(place), prompt_field="prompt")
        samples_N = Samples(store, build.T, has_answers=True)
        tokens_NT, labels_NT = samples_N.batch(range(len(RECORDS)))
    built = build.build(
        degrees,
        f"--privacy.gradient_method={method}",
        f"--training.local_batch_size={samples}",
        args=args,
        max_grad_norm=0.5,
    )
    losses, gradients = by_hand(build.reference_model(args), build.T)
    loss_error = 0.0
    slots = torch.tensor(built.slots(np.arange(len(RECORDS))))
    for slot_B in slots.split(built.gradients.batch_size or samples):
        loss_B = built.losses(*build.take(tokens_NT, labels_NT, slot_B))
        clip = built.gradients.accumulate_clipped(loss_B, slot_B >= 0)
        whole_B = loss_B.detach().clone()
        if built.groups.cp is not None:
            torch.distributed.all_reduce(whole_B, group=built.groups.cp)
        for slot, loss, norm in zip(slot_B.tolist(), whole_B, clip.norm_B, strict=True):
            loss_error = max(loss_error, abs(float(loss) - (losses[slot] if slot >= 0 else 0.0)))
            if slot in (-1, 3, 5):  # padding, and records without a target
                assert float(norm) == 0
    total = built.gradients.clipped_sum.take()
    whole = {name: built.whole(name, flat) for name, flat in total.items()}
    built.gradients.clipped_sum.reset()
    return build.relative_error(whole, build.reference_sum(gradients, 0.5)), loss_error


@pytest.mark.parametrize(
    "degrees, method, samples",
    [
        ((1, 1, 1), "microbatch", 1),
        ((1, 1, 2), "microbatch", 1),
        ((1, 2, 1), "microbatch", 1),
        ((1, 1, 2), "grad_sample", 3),
        ((1, 1, 1), "ghost", 3),
    ],
    ids=str,
)
def test_row06_each_sample_is_divided_by_its_own_targets(
    degrees: tuple[int, int, int], method: str, samples: int
) -> None:
    world_size = degrees[0] * degrees[1] * degrees[2]
    for error, loss_error in on_ranks(world_size, errors, degrees, method, samples):
        assert loss_error < 1e-5
        assert error < 2e-5
