"""Whole runs on records with answers: units with several chats; held-out prompts and chats."""

import json
from pathlib import Path

import pytest
import torch

from tests.data.chats import chat, folder
from tests.processes.ranks import on_ranks
from tests.processes.runs import arguments, with_sigma
from torchtitan_dp.config.load import load_config
from torchtitan_dp.models.causal_lm.model import CausalLM
from torchtitan_dp.models.hugging_face import flavor
from torchtitan_dp.preflight.check import open_records

USERS, STEPS = 6, 2


def held_out_loss(argv: list[str]) -> float:
    """What validation tells of the initial weights, on this rank."""
    from tests.preflight.test_rehearsal import start

    trainer = start(argv)
    try:
        return trainer.validator.validate(trainer.model_parts, 1)
    finally:
        trainer.close()


def loss_by_hand(argv: list[str]) -> float:
    """The mean over held-out prompts of each answer's mean loss; who has none is left out."""
    config = load_config(argv, 1)
    lines = Path(str(config.training.dataset_path)).read_text().splitlines()
    model, losses = CausalLM(flavor("debug")), []
    model.init_weights()
    for position in open_records(config).heldout:
        record = json.loads(lines[position])
        if answer := record["text"]:
            ids = [256, *record["prompt"].encode(), *answer.encode(), 257]
            with torch.no_grad():
                log_p_TV = model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
            targets = range(1 + len(record["prompt"]), len(ids))
            losses.append(-sum(float(log_p_TV[i - 1, ids[i]]) for i in targets) / len(targets))
    assert 0 < len(losses) < len(open_records(config).heldout)
    return sum(losses) / len(losses)


@pytest.mark.thorough
@pytest.mark.parametrize("field", ["prompt_field", "messages_field"])
def test_replicas_tell_the_held_out_loss_of_one_process(tmp_path: Path, field: str) -> None:
    """Each replica has other records, some without an answer, and one has padding."""
    answers = ["", "yes", "no, never", "perhaps in some days"]
    rows = [{"prompt": f"q{i}? ", "text": answers[i % 4]} for i in range(30)]
    if field == "messages_field":
        rows = [{"prompt": chat(row["prompt"], row["text"])} for row in rows]  # type: ignore[dict-item]
    (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, rows)))
    argv = arguments(
        tmp_path / "out",
        tmp_path / "records.jsonl",
        *("--training.dataset=jsonl", f"--data.{field}=prompt", "--data.heldout_fraction=0.5"),
        *("--validation.enable", "--validation.steps=-1", "--training.seq_len=64"),
        *("--checkpoint.no-enable", "--metrics.no-enable_tensorboard", *with_sigma(1)),
        *("--model.flavor=debug", "--parallelism.context_parallel_degree=1"),
        "--comm.train_timeout_seconds=1000",
    )
    if field == "messages_field":
        argv.append(f"--model.hf_assets_path={folder(tmp_path / 'tokenizer')}")
    (one,) = on_ranks(1, held_out_loss, argv)
    mesh = [
        f"--parallelism.data_parallel_{kind}" for kind in ("replicate_degree=2", "shard_degree=1")
    ]
    two = on_ranks(2, held_out_loss, [*argv, *mesh])
    assert two[0] == two[1] == pytest.approx(one, rel=1e-5)
    if field == "prompt_field":
        assert one == pytest.approx(loss_by_hand(argv), rel=1e-5)
