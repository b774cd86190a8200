"""The audit of the exported model: its documents, its attack, its bounds, the whole command."""

import contextlib
import importlib.util
import json
import os
import signal
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

import torchtitan_dp.audit.__main__ as audit
import torchtitan_dp.distributed  # noqa: F401
from tests.data.drawn import sample
from tests.data.stores import store_of
from tests.hazards.test_audit import FAULTS
from tests.processes import forks
from tests.processes.runs import CONFIG, write_records
from torchtitan_dp.audit import released
from torchtitan_dp.audit.released import PlantedSamples, token_ids, write_canaries
from torchtitan_dp.data.dataset import Samples
from torchtitan_dp.data.tokenizer import ByteTokenizer

_MODEL = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=264,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    hidden_act="silu",
)


def test_documents_are_public_distinct_and_begin_with_their_prompts():
    written = write_canaries(100)
    assert written == write_canaries(100)
    assert len({canary.secret for canary in written}) == 100
    assert np.bincount([canary.domain for canary in written]).tolist() == [20] * 5
    for canary in written:
        assert canary.text.startswith(canary.prompt + canary.secret)
        assert canary.secret.strip() not in canary.prompt
        assert canary.text.count(canary.secret.strip()) >= 2


@pytest.mark.parametrize("sampling", ["concat", "random"])
def test_an_excluded_document_is_an_empty_unit(tmp_path, sampling):
    store = store_of(write_records(tmp_path / "data", 3), tmp_path)
    real = Samples(store, 32, one_record=sampling == "random")
    ids = list(token_ids(write_canaries(2), ByteTokenizer(), 33))
    planted = PlantedSamples(real, ids, np.array([True, False]))
    rng = np.random.Generator(np.random.Philox(1)) if sampling == "random" else None
    for unit in range(3):
        ours, theirs = sample(planted, unit, rng=rng), sample(real, unit, rng=rng)
        assert all(map(torch.equal, ours, theirs))
        assert planted.tokens(unit, rng) == real.tokens(unit, rng)
    tokens_T, labels_T = sample(planted, 3, rng=rng)
    assert tokens_T.tolist() == ids[0][:-1].tolist()
    assert labels_T.tolist() == ids[0][1:].tolist()
    assert (sample(planted, 4, rng=rng)[1] == -100).all()
    assert (sample(planted, 3, rng=rng, window=1, windows=2)[1] == -100).all()
    assert [planted.tokens(unit, rng) for unit in (3, 4)] == [32, 0]


def test_a_score_is_a_gain_over_the_starting_weights_within_a_domain(monkeypatch):
    values = {"new": np.array([3.0, 5.0, 9.0, np.nan]), "old": np.array([1.0, 1.0, 2.0, 0.0])}
    monkeypatch.setattr(released, "log_likelihoods", lambda model, ids: values[model].copy())
    documents = [SimpleNamespace(domain=domain) for domain in (0, 0, 1, 1)]
    assert released.score("new", "old", [], documents).tolist() == [-1.0, 1.0, 2.5, -2.5]


def attacked(connection, argv, fault, log, cache):
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ |= {"XDG_CACHE_HOME": str(cache), "GLOO_SOCKET_IFNAME": "lo"}
    with contextlib.ExitStack() as planted:
        if fault:
            planted.enter_context(FAULTS[fault]())
            planted.enter_context(
                mock.patch("torchtitan_dp.train.trainer.prove")
            )  # it sees it, too
        audit.main(argv)


def run_audit(folder, name, fault, *options):
    """The command on a tiny model, in a process of its own."""
    data = folder / "data"
    if not data.exists():
        write_records(data, 4)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(_MODEL))
    argv = [
        *("--instrument=text", f"--job.config_file={CONFIG}"),
        *(f"--job.dump_folder={folder / name}", f"--training.dataset_path={data}"),
        *(f"--model.hf_assets_path={folder / 'model'}", "--training.seq_len=160"),
        *("--training.local_batch_size=8", "--privacy.sample_rate=1"),
        *("--data.heldout_fraction=0", "--validation.no-enable", "--privacy.accountant=rdp"),
        *(f"--json={folder / name}.json", *options),
    ]
    log = folder / f"{name}.log"
    process = forks.Process(attacked, argv, fault, log, folder / "cache")
    try:
        code = process.wait(900)
    finally:
        process.send_signal(signal.SIGKILL)
    text = log.read_text()
    assert code in (0, 1), text
    assert (folder / f"{name}.json").exists(), text
    result = json.loads((folder / f"{name}.json").read_text())
    return SimpleNamespace(code=code, log=text, result=result, folder=folder / f"{name}_audit")


def test_the_exported_model_is_attacked_and_stays_under_its_claim(tmp_path):
    options = ["--lora.rank=4", "--lora.export=merged"]
    steps = ["--training.steps=2", "--training.global_batch_size=12", "--canaries=40"]
    run = run_audit(tmp_path, "clean", None, "--privacy.target_epsilon=4", *steps, *options)
    assert run.code == 0, run.log
    result = run.result
    assert result["instrument"] == "text"
    assert result["epsilon_lower_bound"] < result["epsilon_claimed"] <= 4
    assert result["extracted"]["greedy"] == {"included": 0, "excluded": 0}
    assert 0 < result["detected_at_most"] < 1
    assert "by the exported model alone" in run.log
    assert set(json.loads((run.folder / "audit_guesses.json").read_text())) == {"scores", "guesses"}
    assert (run.folder / "hf" / "model.safetensors").is_file()
    told = json.loads((run.folder / "privacy.json").read_text())
    assert told["private"] is False
    assert "audited: 40 canaries were trained on" in told["caveats"]
    carried = json.loads((run.folder / "hf" / "privacy.json").read_text())  # wherever it is copied
    assert carried["private"] is False


@pytest.mark.thorough
def test_a_run_without_clipping_is_flagged_by_its_exported_model_alone(tmp_path):
    terms = [
        *("--privacy.target_epsilon=0.1", "--privacy.max_grad_norm=0.0001", "--optimizer.lr=0.02"),
        *("--privacy.debug_seed=5", "--training.steps=32", "--training.global_batch_size=204"),
        "--canaries=200",
    ]
    run = run_audit(tmp_path, "planted", "no clipping", *terms)
    assert run.code == 1, run.log
    assert run.result["epsilon_lower_bound"] > 0.1
    assert "FAULT" in run.log


@pytest.mark.parametrize(
    "instrument, missing, options, names",
    [
        ("text", (), ["--privacy.noise=banded"], "privacy.noise = 'banded'"),
        ("text", (), ["--canaries=0"], "--canaries = 0"),
        ("text", (), ["--job.dump_folder={used}"], "used_audit has a run already"),
        ("text", ("peft",), ["--lora.rank=4"], "lora.export = 'adapter'"),
        ("game", (), ["--privacy.no-enable"], "privacy.enable"),
        ("game", (), ["--trials=20"], "--trials = 20"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(
    tmp_path, capsys, monkeypatch, instrument, missing, options, names
):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in missing else found(name)
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    used = tmp_path / "used_audit"
    used.mkdir()
    (used / "steps_executed.log").write_text("1\n")
    command = [
        *(f"--instrument={instrument}", f"--job.config_file={CONFIG}"),
        *(f"--training.dataset_path={write_records(tmp_path / 'data')}",),
        *("--data.heldout_fraction=0", "--validation.no-enable", "--privacy.accountant=rdp"),
        *(f"--job.dump_folder={tmp_path / 'out'}", "--training.global_batch_size=3"),
        *(option.format(used=tmp_path / "used") for option in options),
    ]
    umask = os.umask(0o077)
    try:
        with pytest.raises(SystemExit) as stop:
            audit.main(command)
    finally:
        os.umask(umask)
    assert stop.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()
    message = [line for line in said if not line.startswith("not private: tokenizing ")]
    assert len(message) == 1, message
    assert names in message[0]
    assert not (tmp_path / "out_audit").exists()
