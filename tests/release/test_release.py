"""Releases: what leaves a run's folder, what its card claims, and which runs are refused."""

import dataclasses
import doctest
import hashlib
import json
import os
import re
import shutil
import stat
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

import torchtitan_dp.privacy.meaning as templates_module
import torchtitan_dp.release.__main__ as release_module
from tests.accounts import begun, edit, ended, publish
from tests.build import config as small_config
from tests.models.hugging_face import (
    SCALED,
    edit_config,
    sample_tokens,
    transformers_logits,
    write_llama,
)
from tests.processes.runs import arguments, privacy, train, weights, with_sigma, write_records
from torchtitan_dp.base.process import lock_folder
from torchtitan_dp.checkpoint.folder import verify
from torchtitan_dp.checkpoint.plan import earlier_ledger, settings_of
from torchtitan_dp.checkpoint.start import with_initial
from torchtitan_dp.config.load import read_config, write_config
from torchtitan_dp.data.tokenizer import ByteTokenizer
from torchtitan_dp.ledger import Lineage, Settings, schema
from torchtitan_dp.ledger.lineage import LATER, Ancestor, History, not_private, with_caveats
from torchtitan_dp.ledger.spending import PUBLIC
from torchtitan_dp.models.causal_lm.model import CausalLM
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.privacy.meaning import e_to_the
from torchtitan_dp.release.__main__ import empty_model, main, release
from torchtitan_dp.release.card import LOST_STATED, OWNER_ITEMS, STOP_STATED, model_card

FILES = [
    *("README.md", "SHA256SUMS", "config.json", "model.safetensors", "privacy.json"),
    *("tokenizer.json", "tokenizer_config.json"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A private run of 4 steps at cp 2; not to be changed."""
    place = tmp_path_factory.mktemp("SecretPlace")
    overrides = arguments(place / "SecretRun", write_records(place / "SecretData"), *with_sigma(1))
    train([*overrides, "--parallelism.context_parallel_degree=2"], log=place / "log")
    return place / "SecretRun"


@pytest.fixture
def run(finished, tmp_path):
    """A copy that may be spoilt; its checkpoints are links."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder, ignore=shutil.ignore_patterns("step-*"))
    for step in (finished / "checkpoint").glob("step-*"):
        (folder / "checkpoint" / step.name).symlink_to(step)
    return folder


def lose_steps(run, count, loses=None):
    """As a run does that is killed `count` steps after its last checkpoint."""
    begun(earlier_ledger(str(run)), run, count, loses=loses or count)


@pytest.fixture(scope="module")
def released(finished, tmp_path_factory):
    out = tmp_path_factory.mktemp("released") / "model"
    main([str(finished), str(out)])
    return out


@pytest.fixture
def made(run, tmp_path):
    """A release of the run as it is: its terms, which it publishes, and its card."""

    def release_it(*options, of=run, name="out"):
        out = tmp_path / name
        main([str(of), str(out), *options])
        return privacy(out), (out / "README.md").read_text()

    return release_it


def test_it_holds_these_files_with_their_sums_and_no_more(released):
    assert sorted(os.listdir(released)) == FILES
    assert os.listdir(released.parent) == ["model"]
    for path in (released, *released.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    sums = [line.split("  ") for line in (released / "SHA256SUMS").read_text().splitlines()]
    assert [name for _, name in sums] == [f for f in FILES if f not in ("SHA256SUMS", "README.md")]
    for digest, name in sums:
        assert hashlib.sha256((released / name).read_bytes()).hexdigest() == digest


def test_transformers_computes_what_the_trainer_did(released, finished):
    model = CausalLM(shape(read_config(str(finished))))
    model.load_state_dict(weights(finished / "checkpoint" / "step-4"), strict=False)
    with torch.no_grad():
        expected = model(sample_tokens())
        found = AutoModelForCausalLM.from_pretrained(released)(sample_tokens()).logits
    assert (found - expected).abs().max() < 1e-4
    assert expected.std() > 0.1


def test_the_byte_tokenizer_comes_along(released):
    tokenizer = AutoTokenizer.from_pretrained(released)
    text = "".join(map(chr, [*range(0x300), 0x20AC, 0x1F600])) + "  two  spaces\r\n"
    ids = tokenizer(text).input_ids
    assert ids == [256, *ByteTokenizer().encode(text).tolist()]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)


def test_the_card_and_the_terms_say_what_was_spent(released, finished):
    terms, spent = privacy(released), privacy(finished)
    of_others = {"bands", "column", "round_steps"}  # of correlated noise, of rounds
    keys = [key.name for key in schema.KEYS if key.in_releases]
    assert list(terms) == [name for name in keys if name not in of_others]
    assert terms["run"].startswith(f"{spent['run']}/")
    only_there = {"epsilon_counts": "planned_steps", "run": terms["run"]}
    assert terms == {key: spent[key] for key in terms if key in spent} | only_there
    card = (released / "README.md").read_text()
    assert card.startswith("---\n# license: ")
    assert f"with ε = {rounded_up(spent['epsilon_executed'])} and δ = 0.001 |" in card
    for part in (
        *("one record (one file)", "`zero_out`", "`rdp`: Opacus' Renyi accountant"),
        *("Choice among runs", "| steps lost in crashes | none |", "| program | torchtitan_dp "),
        *("random weights of a public seed", "Attacks on timing"),
        "false positives detects at most",
    ):
        assert part in card, part
    assert not re.search(r"None|[{}]", card)


def test_nothing_private_leaves(released, finished):
    """Neither place nor text of the records, nor the run's own folder, fingerprint and user."""
    fingerprint = (finished / "data_fingerprint.private").read_text().strip()
    secrets = ["SecretPlace", "SecretData", "SecretRun", "record_0", "record 1 ", fingerprint]
    secrets += [str(released.parent), "dump_folder", "exp_avg", "not_private"]
    for path in released.iterdir():
        content = path.read_bytes()
        for secret in secrets:
            assert secret.encode() not in content, (path.name, secret)
    # They would be found: the configuration that stays behind has them.
    kept = (finished / "run_config.json").read_text()
    assert "SecretData" in kept
    assert "SecretRun" in kept
    assert stat.S_IMODE((finished / "run_config.json").stat().st_mode) == 0o600


def test_what_is_claimed_does_not_depend_on_how_many_steps_a_crash_lost(run, made, tmp_path):
    """Hazard row 59: a clock decides that number. Nor on whether it lost any."""
    told = []
    for lost in (0, 1, 2):
        folder = tmp_path / f"run_{lost}"
        shutil.copytree(run, folder, symlinks=True)
        lose_steps(folder, lost, loses=2)
        told.append(made(of=folder, name=f"out_{lost}"))
        told[-1][0].pop("run")  # each release's own name
    assert told[0] == told[1] == told[2]
    terms, card = told[0]
    assert (terms["steps"], terms["steps_executed"]) == (4, 6)
    before = privacy(run)["epsilon_executed"]
    assert terms["epsilon_executed"] > before
    assert f"with ε = {rounded_up(terms['epsilon_executed'])} and δ" in card
    assert rounded_up(before) not in card


def test_lost_steps_that_nobody_saw_may_be_left_out(run, made):
    before = privacy(run)["epsilon"]
    lose_steps(run, 3)
    terms, card = made("--lost_steps_not_seen")
    assert terms["epsilon"] == pytest.approx(before, rel=1e-6)
    assert terms["epsilon_executed"] > terms["epsilon"]
    assert terms["epsilon_counts"] == "kept_and_planned_steps"
    assert LOST_STATED in terms["caveats"]
    assert sum(event["count"] for event in terms["dp_event"]["events"]) == 4
    assert f"with ε = {rounded_up(before)} and δ" in card
    assert "| ε covers | the 4 steps of these weights |" in card
    assert "| steps lost in crashes | 3 at most" in card


def test_a_run_that_stopped_early_claims_what_was_planned(run, made):
    """Unless its owner states that results had no part in it; hazard row 50."""
    ledger = dataclasses.replace(earlier_ledger(str(run)), planned_steps=200)
    spent = publish(ledger, run)  # as a run does that was asked to stop at step 4
    assert spent["epsilon_planned"] > 2 * spent["epsilon_executed"]
    meanings = []
    for stated, options, counts in (
        (True, ["--stop_not_from_results"], "executed_steps"),
        (False, [], "planned_steps"),
    ):
        terms, card = made(*options, name=f"out_{stated}")
        expected = spent["epsilon_executed" if stated else "epsilon_planned"]
        assert terms["epsilon"] == pytest.approx(expected, rel=1e-6)
        assert terms["epsilon_counts"] == counts
        assert f"with ε = {rounded_up(terms['epsilon'])} and δ" in card
        assert (STOP_STATED in terms["caveats"]) == stated
        assert ("196 that were planned and not taken" in card) == (not stated)
        steps = [event["count"] for event in terms["dp_event"]["events"]]
        assert sum(steps) == (4 if stated else 200)
        meanings.append(terms["meaning"])
    assert meanings[0]["posterior_from_half"] < meanings[1]["posterior_from_half"]


def test_older_weights_claim_what_was_begun_and_what_they_still_planned(run, made, capfd):
    """The newest checkpoint was lost: going on from the one before takes its steps again."""
    (run / "checkpoint" / "step-4").unlink()
    terms, card = made()
    assert (terms["steps"], terms["planned_steps"], terms["steps_executed"]) == (2, 4, 4)
    assert sum(event["count"] for event in terms["dp_event"]["events"]) == 6
    assert terms["epsilon"] > terms["epsilon_executed"]
    only = "it holds only if no loss, no log and no clock made the owner stop after 2 of 4"
    assert only in capfd.readouterr().out
    assert only in card.partition("In words")[0]
    covers = "the 2 steps of these weights, 2 that crashes may have lost, 2 that were planned"
    assert f"| ε covers | {covers} and not taken |" in card


def test_other_runs_that_the_owner_names_are_added_up_in_the_card(run, made, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    publish(with_caveats(earlier_ledger(str(run)), f"its C was 2 {LATER}"), other)
    (run / "checkpoint" / "step-4").unlink()  # two steps are kept, two are lost, two planned
    _, card = made("--with", str(other))
    terms = earlier_ledger(str(run)).settings
    assert "| Together with 1 other run | that the owner named, " in card
    assert f": ε = {rounded_up(terms.compose([terms.segment(6 + 4)]))}, δ = " in card
    assert "Of a run that the owner named: its C was 2 after the first start" in card
    shutil.rmtree(other / "checkpoint")
    with pytest.raises(SystemExit):
        made("--with", str(other), name="none")
    assert "other': not verified, or not private by its ledger" in capsys.readouterr().err


def test_what_a_resume_changed_is_a_condition_of_the_promise(run, made):
    raised = f"training.steps was raised from 2 to 4 {LATER}"
    publish(with_caveats(earlier_ledger(str(run)), raised), run)
    promise = made()[1].partition("In words")[0]
    why = "no loss, no log and no clock decided that training.steps was raised from 2 to 4 after"
    assert f"; **it holds only if {why} the first start**" in promise


@pytest.mark.parametrize("how", ["itself", "linked"])
def test_a_release_brings_its_ledger_along_as_initial_weights(released, how, tmp_path):
    """Also where only its weights are linked into another folder."""
    folder = released
    if how == "linked":
        folder = tmp_path / "base"
        folder.mkdir()
        (folder / "model.safetensors").symlink_to(released / "model.safetensors")
    (ancestor,) = with_initial(History(), small_config(), str(folder)).ancestors
    assert ancestor.run == privacy(released)["run"]
    assert sum(segment.steps for segment in ancestor.spent()) == 4


def test_what_only_the_owner_knows_is_listed_at_the_end(made, capfd):
    _, card = made()
    said = capfd.readouterr().out
    assert card.count("**TO FILL IN**") == len(OWNER_ITEMS)
    for title, question in OWNER_ITEMS.items():
        assert title in said
        assert f"- **{title}.** {question}\n  **TO FILL IN**" in card


@pytest.fixture
def card(released, finished):
    """The card of the release with other terms, names and settings."""

    def card_of(base_model=None, decay=None, terms=None, **settings):
        config = read_config(str(finished))
        for key, value in settings.items():
            section, _, name = key.partition("_")
            setattr(getattr(config, section), name, value)
        terms = privacy(released) | (terms or {})
        return model_card(terms, config, shape(config), decay=decay, base_model=base_model)

    return card_of


@pytest.mark.parametrize("caveat", [PUBLIC, f"of the initial weights: {PUBLIC}"])
def test_given_weights_are_told_though_the_last_start_did_not_name_them(card, caveat):
    """A start that resumes loads no initial weights: its configuration may have lost them."""
    assert "random weights" in card()
    assert "random weights" not in card(terms={"caveats": [caveat]})
    assert "The weights that training started from were given." in card(terms={"caveats": [caveat]})


def test_rounding_is_never_down():
    for epsilon in (1.00001, 7.96124, 0.000123456, 1e-9, 99999.5, 8.0, 1 / 3):
        assert epsilon <= float(rounded_up(epsilon)) <= epsilon * 1.0002
    assert tuple(map(e_to_the, (0.95555, 8.0, 40.0))) == ("2.61", "2990", "10^18")
    assert doctest.testmod(templates_module).failed == 0


def test_no_claim_of_a_card_is_rounded_in_its_own_favour(card, released):
    """Delta and C to the last digit, q not below, sigma not above what was."""
    sigma, q = 0.45812367, 0.12345612
    terms = {"delta": 1.2345649e-6, "max_grad_norm": 0.12345678, "sample_rate": q}
    terms = privacy(released) | terms | {"noise_multiplier": sigma}
    terms["ancestors"] = [Ancestor("before", Settings.from_fields(terms), 2, 2, 0).fields()]
    found = card(terms=terms)
    assert found.count("1.2345649e-06") == 2
    assert "1.23456e-06" not in found
    assert "clipping | to norm C = 0.12345678, flat" in found
    assert "| sampling rate q | 0.123457, from" in found
    assert "| noise multiplier σ | 0.458123 |" in found
    assert "| before that | 2 steps with σ = 0.458123, q = 0.123457 |" in found


def test_a_card_takes_the_base_models_name(card):
    unit = {"terms": {"privacy_unit": "unit of data.unit_field 'patient_id'"}}
    unit["data_unit_field"] = "patient_id"
    named = card("org/base", lora_rank=4, **unit)
    whose = "(all records with one value of `patient_id`) |"
    assert f"| Protected unit | one patient {whose}" in named
    assert f"| privacy unit | one unit {whose}" in named
    assert "| units in training | 24, public |" in named
    assert "data.unit_field" not in named
    assert "\nbase_model: org/base\n" in named
    assert "AutoPeftModelForCausalLM.from_pretrained" in named
    assert not re.search("BASE MODEL", named)
    unnamed = card(lora_rank=4, **unit)
    for part in ("\n# base_model: TO FILL IN", 'from_pretrained("BASE MODEL")', "--base_model"):
        assert part in unnamed


def front_matter(folder):
    """As the hub reads it."""
    return ModelCard.load(folder / "README.md").data.to_dict()


def test_front_matter_has_what_the_owner_names_and_no_more(released, made, tmp_path):
    assert front_matter(released) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["differential-privacy", "dp-sgd"],
    }
    blank = (released / "README.md").read_text().partition("---\n\n")[0]
    for key in ("license", "base_model", "datasets"):
        assert f"\n# {key}: TO FILL IN (" in blank
    made("--base_model", "meta-llama/Llama-3.2-1B")
    assert front_matter(tmp_path / "out") == front_matter(released) | {
        "base_model": "meta-llama/Llama-3.2-1B",
        "base_model_relation": "finetune",
    }


PATHS = ("/home/alice/oncology/llama", "~/llama", "./llama", "C:\\llama", "a/b/c", "x\ny: z", "")


@pytest.mark.parametrize("name", ["null", "2024", *PATHS])
def test_paths_and_what_would_break_the_front_matter_are_no_names(name, made, tmp_path, capfd):
    with pytest.raises(SystemExit, match="2"):
        made("--base_model", name)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: --base_model = '")
    assert not (tmp_path / "out").exists()


def edited(**changes):
    """A fault: other values in privacy.json."""
    return lambda run: edit(run, **changes)


def written(name, text):
    return lambda run: (run / name).write_text(text)


def without(name):
    return lambda run: (run / name).unlink()


def without_ledger(run):
    """As `checkpoint.last_save_model_only` leaves it."""
    step = run / "checkpoint" / "step-9"
    dcp.save({"model.model.embed_tokens.weight": torch.zeros(1)}, checkpoint_id=step, no_dist=True)


def truncated(run):
    step = run / "checkpoint" / "step-4"
    source = step.resolve()
    step.unlink()
    shutil.copytree(source, step)
    for part in step.glob("*.distcp"):
        part.write_bytes(part.read_bytes()[:1000])


def another_model(run):
    values = json.loads((run / "run_config.json").read_text())
    values["model"]["flavor"] = "30M"
    (run / "run_config.json").write_text(json.dumps(values))


OTHER_TERMS = "its terms are not those of privacy.json"
REFUSED = [
    (shutil.rmtree, "has no privacy.json: name"),
    (written("privacy.json", "{"), "cannot be read"),
    (without("run_config.json"), "run_config.json, which describes"),
    (another_model, "model.flavor = '30M'"),
    (  # as a start with a `debug_seed` after the checkpoint does
        edited(private=False, epsilon=None, caveats=["privacy.debug_seed was set"]),
        "NOT private (privacy.debug_seed was set)",
    ),
    (edited(epsilon=None), "NOT private"),
    (edited(noise_multiplier=1.001), f"{OTHER_TERMS}: privacy.noise_multiplier = 1.0"),
    (edited(epsilon_executed=0.1), "epsilon_executed = 0.1, but"),
    (edited(steps=2, steps_executed=2), "is further than the 2 steps of privacy.json"),
    (without("steps_executed.log"), "steps_executed.log or starts.log lacks steps"),
    (without_ledger, "step-9 cannot be read"),
    (truncated, "step-4 cannot be read"),
    (
        lambda run: (run / "checkpoint/step-4").rename(run / "checkpoint/step-40"),
        "its ledger counts 4 steps",
    ),
    (lambda run: (run / "checkpoint").rename(run / "moved"), "no whole checkpoint"),
]


@pytest.mark.parametrize("spoil, said", REFUSED)
def test_a_run_is_refused_in_one_line_and_nothing_is_left(spoil, said, run, tmp_path, capfd):
    spoil(run)
    out = tmp_path / "place" / "out"
    with pytest.raises(SystemExit) as stop:
        main([str(run), str(out)])
    assert stop.value.code == 2
    (line,) = [x for x in capfd.readouterr().err.splitlines() if x.startswith("error")]
    assert said in line
    assert not list(tmp_path.glob("place/*"))
    assert run.exists() == ("has no privacy.json" not in said)  # none is made by looking


@pytest.mark.parametrize(
    "prepare, where, said",
    [
        (Path.mkdir, "out/", "exists already"),
        (Path.touch, "out", "exists already"),
        (lambda out: Path(f"{out}.tmp").mkdir(), "out", "remove it"),
        (lambda out: None, "run/out", "inside the run"),
        (lambda out: None, "run", "exists already"),
    ],
)
def test_a_place_is_refused(prepare, where, said, run, tmp_path):
    prepare(tmp_path / where)
    if where == "out/":
        (tmp_path / "out" / "file").touch()  # an empty folder is taken
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=said):
        release(str(run), str(tmp_path / where))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_goes_on_is_refused(run, tmp_path):
    with lock_folder(str(run)):
        assert "a run is training in it: until it ends" in verify(str(run)).notes[-1]
        with pytest.raises(ValueError, match="another run uses it"):
            release(str(run), str(tmp_path / "out"))
    assert not verify(str(run)).notes


def test_nothing_is_left_when_writing_fails(run, tmp_path, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(release_module, "_sha256", full)
    with pytest.raises(ValueError, match=r"cannot be written \(No space left on device\)"):
        release(str(run), str(tmp_path / "out"))
    assert os.listdir(tmp_path) == ["run"]


def test_a_mark_in_the_checkpoint_is_enough(run, tmp_path, monkeypatch):
    """A `privacy.json` from before the audit, beside a ledger that tells of it."""
    read = release_module.read_ledger

    def audited(folder):
        return not_private(read(folder), "audited")

    monkeypatch.setattr(release_module, "read_ledger", audited)
    with pytest.raises(ValueError, match=r"NOT private \(audited\)"):
        release(str(run), str(tmp_path / "out"))


def test_tied_weights_and_a_given_tokenizer(tmp_path):
    """A run from a Hugging Face folder, as its trainer leaves it; into an empty OUT."""
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    out.mkdir()
    given = write_llama(tmp_path / "given", tied=True, rope=SCALED, eps=1e-6)
    edit_config(given, _name_or_path="/home/me/model", quantizer={"cache": "/home/me/oncology"})
    noted = json.loads((given / "tokenizer_config.json").read_text())
    noted["tokenizer_file"] = str(given / "tokenizer.json")
    noted["extra"] = [{"seen": "C:\\records"}, "kept"]
    (given / "tokenizer_config.json").write_text(json.dumps(noted))
    config = small_config(
        f"--job.dump_folder={run}",
        f"--model.hf_assets_path={os.path.relpath(given)}",
        *("--checkpoint.enable", "--checkpoint.initial_load_in_hf"),
        *("--privacy.sample_rate=0.01", "--privacy.accountant=rdp"),
        degrees=(1, 2, 2),
    )
    write_config(config)
    caveat = "the initial weights are assumed to be public"
    ledger = ended(Lineage(settings_of(config, 100, 1.0), caveats=(caveat,)), run, 1)
    publish(ledger, run)
    torch.manual_seed(1)
    model = CausalLM(shape(config))
    state = {**model.state_dict(), "train_state": {"ledger": ledger.to_json()}}
    dcp.save(state, checkpoint_id=run / "checkpoint" / "step-1", no_dist=True)

    empty = empty_model(shape(config))
    assert empty.output.weight is empty.tok_embeddings.weight
    release(str(run), str(out))
    assert sorted(os.listdir(out)) == sorted({*FILES, "generation_config.json"})
    with torch.no_grad():
        expected = model(sample_tokens())
    assert (transformers_logits(out) - expected).abs().max() < 1e-4
    assert (out / "tokenizer.json").read_bytes() == (given / "tokenizer.json").read_bytes()
    of_model = json.loads((out / "config.json").read_text())
    of_tokenizer = json.loads((out / "tokenizer_config.json").read_text())
    assert not {"_name_or_path", "tokenizer_file"} & {*of_model, *of_tokenizer}
    assert (of_model["quantizer"], of_tokenizer["extra"]) == ({}, [{}, "kept"])
    card = (out / "README.md").read_text()
    for part in ("`add_remove`", f"- {caveat.capitalize()}.", "The tokenizer was given"):
        assert part in card
