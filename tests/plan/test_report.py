"""The page of the plans, which `python -m torchtitan_dp.plan.report` writes."""

import subprocess

from torchtitan_dp.config.load import load_config
from torchtitan_dp.plan import report
from torchtitan_dp.plan.memory import CATEGORIES, GIB, MemoryPlan


def test_the_page_has_memory_one_block_and_long_steps(tmp_path, monkeypatch):
    """The table of long steps lists configurations of long samples alone."""
    asked = []

    def predicted(overrides, ranks, memory_gib, *, longest):
        tokens = load_config(overrides, ranks).training.seq_len
        return MemoryPlan(ranks, tokens, dict.fromkeys(CATEGORIES, GIB), memory_gib, {})

    def run(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="| tensor | shape |\n")

    folder = tmp_path / "configs"
    folder.mkdir()
    for name in ("llama3_8b_1m_lora", "llama3_debug"):
        (folder / f"{name}.toml").symlink_to(report.TRAIN_CONFIGS / f"{name}.toml")
    monkeypatch.setattr(report, "predict", predicted)
    monkeypatch.setattr(subprocess, "run", run)
    report.write_page(str(tmp_path / "page.md"), folder)
    memory, block, steps = (tmp_path / "page.md").read_text().split("\n## ")
    assert memory.count("`llama3_8b_1m_lora`") == 1 + 4
    assert memory.count("`llama3_debug`") == 1
    assert block.startswith("One block by tensor\n")
    assert "| tensor | shape |\n" in block
    assert steps.count("| `llama3_8b_1m_lora` |") == 2  # of 4 and of 8 ranks
    assert "llama3_debug" not in steps
    (command,) = asked
    assert command[2:4] == ["torchtitan_dp.plan.timeline", "8"]
    assert command[-1].endswith("llama3_8b_1m_lora.toml")
