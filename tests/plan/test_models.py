"""Models of transformers, planned from the values of their public `config.json`."""

import dataclasses

import pytest

import torchtitan_dp.distributed  # noqa: F401

# isort: split
import torchtitan_dp.plan.__main__ as plan
from scripts import models
from tests.processes import forks
from tests.processes.runs import ROOT
from torchtitan_dp.base.torch_private import real_tensors
from torchtitan_dp.config.load import load_config
from torchtitan_dp.models.hugging_face import on_meta, parameter_count, shape, trained_count
from torchtitan_dp.plan.fake_step import fake_world
from torchtitan_dp.plan.prediction import few_layers
from torchtitan_dp.plan.roofline import flops_of
from torchtitan_dp.selfcheck.small import given_terms

PAGE = (ROOT / "docs/models.md").read_text()
NAMES = {name.partition(" ")[0].partition("/")[2]: name for name in models.CONFIGS}
GEMMA_4B, GPT_OSS = "gemma-3-4b-it", "gpt-oss-20b"


@pytest.fixture
def given(tmp_path):
    """The command line of a model, with changes of its `config.json`."""
    return lambda name, **changes: models.arguments(models.CONFIGS[NAMES[name]] | changes, tmp_path)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # those of the weights that are published
        (GEMMA_4B, 4_300_079_472 - 419_816_304),  # without its vision tower and projector
        ("medgemma-27b-text-it", 27_009_002_240),
        ("Mistral-7B-v0.1", 7_241_732_096),
        ("Phi-4-mini-instruct", 3_836_021_760),
        ("Qwen2.5-7B", 7_615_616_512),
        (GPT_OSS, 20_914_757_184),
    ],
)
def test_parameters_are_as_many_as_were_published(given, name, parameters):
    arguments = given(name)
    args = shape(load_config(arguments, 1))
    assert parameter_count(args) - trained_count(args) == parameters
    assert " | ".join(models.facts(NAMES[name], arguments)) in PAGE


@pytest.mark.parametrize("name", NAMES)
def test_the_proof_and_selfcheck_have_a_small_model_of_each(given, name):
    own, *_ = given_terms(given(name), 4)
    assert parameter_count(own.args) < 5e7
    whole = {window is None for window in shape(load_config(given(name), 4)).windows()}
    assert {window is None for window in own.args.windows()} == whole
    assert all(window < own.args.max_seq_len for window in own.args.windows() if window)


def test_flops_by_hand_of_windows_and_experts(given):
    """gpt-oss: a token takes 4 of 32 experts; every other layer sees 128 tokens."""
    config = load_config(given(GPT_OSS), 8)
    found = flops_of(config, shape(config))
    T, D, rank = 32768, 2880, 16
    queries, keys = 64 * 64, 8 * 64
    frozen = 2 * D * queries + 2 * D * keys + 32 * D + 4 * 3 * D * D
    trained = rank * (2 * (D + queries) + 2 * (D + keys))
    output = 201_088 * D
    # Forward, again, and the gradient of the input: 2 each; adapters have one of their own.
    of_tokens = 24 * (6 * frozen + 8 * trained) + 4 * output
    assert found.products == pytest.approx(T * of_tokens, rel=1e-12)
    # Queries see a half of all tokens on average, or 128, but the first 127 fewer.
    scores = 12 * T * T / 2 + 12 * (128 * T - 128 * 128 / 2)
    assert found.attention == pytest.approx(2 * queries * scores * (2 + 2 + 5), rel=1e-12)


def test_few_layers_begin_and_end_as_all_do(given):
    of_each = {"medgemma-27b-text-it": (14, 20), GPT_OSS: (6, 8), "Qwen2.5-7B": (4, 5)}
    for name, few in of_each.items():
        args = shape(load_config(given(name), 1))
        assert few_layers(args) == few
        for layers in few:
            windows = dataclasses.replace(args, n_layers=layers).windows()
            assert windows == args.windows()[:layers]
            assert windows[-2:] == args.windows()[-2:]


@pytest.mark.slow
@pytest.mark.thorough_cases("gemma*", "medgemma*", "Phi*", "Qwen*", "gpt-oss*", "*-8")
@pytest.mark.parametrize("ranks", models.RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_what_is_planned(given, name, ranks, monkeypatch):
    """A quarter of a minute of CPU time or more each."""
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| `{NAMES[name]}`"))
    shown = dict(zip(models.RANKS, row.strip("| ").split(" | ")[-2:], strict=True))
    monkeypatch.setattr(models, "RANKS", (ranks,))
    assert models.plans(given(name)) == [shown[ranks]]


def test_the_folder_of_any_model_is_to_be_named(capsys):
    """The file as it is shipped."""
    with pytest.raises(SystemExit) as stop:
        plan.main(["--job.config_file", str(models.ANY_LORA), "--world_size=1", "--no_memory"])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "model.hf_assets_path = '/path/to/model': no such folder; name the one with" in said


def norms_in_a_fake_step():
    from tests import build

    with fake_world(1), real_tensors():
        norms = on_meta(build.ARGS).layers[0].input_layernorm, on_meta(build.ARGS).outer()[0]
    return [type(norm).__name__ for norm in norms]


def test_a_fake_step_recognizes_norms():
    """It replaces `F.rms_norm`: a plan once counted transformers' own."""
    assert forks.call(norms_in_a_fake_step) == ["RMSNorm", "RMSNorm"]
