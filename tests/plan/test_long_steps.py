"""The plans' table of long steps: which rows it has, and their hours."""

import dataclasses

import pytest

from tests.processes.runs import ROOT
from torchtitan_dp.config.load import load_config
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.plan.long_steps import LONG, LongStep, section


def step_of(name, ranks, *overrides):
    given = ["--job.config_file", str(ROOT / "train_configs" / f"{name}.toml"), *overrides]
    config = load_config(given, ranks)
    return LongStep.of(name, config, shape(config), ranks)


def test_hours_of_a_step_of_8b_at_a_million_tokens():
    """By hand: attention alone, two forward products, as many again, and five in backward."""
    T, samples, steps = 2**20, 512, 25
    found = step_of("llama3_8b_1m_lora", 8)
    attention = 32 * 9 * (2 * 4096 * T**2 / 2)
    sample = attention / found.cost.attention_share
    assert 0.9 < found.cost.attention_share < 1
    assert found.cost.flops_per_sample == pytest.approx(sample)
    hours = samples * sample / (8 * 0.4 * 989e12) / 3600
    name, ranks, tokens, flops, _, drawn, all_, one, of, run = found.row().split(" | ")
    assert (name, ranks, tokens) == ("| `llama3_8b_1m_lora`", "8", "1,048,576")
    assert (float(flops), drawn, of) == (pytest.approx(sample, rel=5e-3), str(samples), str(steps))
    assert float(all_) == pytest.approx(samples * sample, rel=5e-3)
    assert one == f"{hours:,.1f}"
    assert run == f"**{hours * steps:,.0f}** |"


def test_more_ranks_take_fewer_hours_and_as_many_flops():
    four, eight = (step_of("llama3_8b_1m_lora", ranks).cost for ranks in (4, 8))
    assert four.flops_per_step == eight.flops_per_step
    assert four.seconds_per_step == pytest.approx(2 * eight.seconds_per_step)


def test_the_table_has_long_samples_and_each_row_once():
    long = step_of("llama3_1b_1m_ac", 4)
    short = dataclasses.replace(long, name="short", seq_len=LONG - 1)
    text = section([long, short, long])
    assert text.count(long.row()) == 1
    assert "`short`" not in text
    assert "prediction" in text


def test_trls_measured_step_is_half_of_the_peak_as_the_page_says():
    qwen = step_of("qwen3_8b_64k_lora", 8, "--lora.rank=0", "--training.seq_len=1048576")
    share = qwen.cost.flops_per_sample / 380 / (8 * 989e12)
    print(f"{share:.1%}")
    assert share == pytest.approx(0.5, abs=0.02)
