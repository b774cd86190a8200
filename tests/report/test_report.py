"""The page on a run, of folders in any state."""

import fcntl
import html
import re

import pytest
from torch.utils.tensorboard import SummaryWriter

from tests.accounts import begun, ended, write
from tests.build import config as small_config
from torchtitan_dp.config.load import RUN_CONFIG_FILE, write_config
from torchtitan_dp.ledger import Lineage
from torchtitan_dp.ledger.lineage import Settings, not_private
from torchtitan_dp.ledger.schema import read_published_fields, write_published
from torchtitan_dp.ledger.spending import epsilon
from torchtitan_dp.privacy.segments import Mechanism
from torchtitan_dp.report import __main__ as page_of
from torchtitan_dp.report.__main__ import Chart, main, report
from torchtitan_dp.report.run_folder import SECONDS, open_run, read_scalars

SETTINGS = Settings(
    mechanism=Mechanism(1.0, 0.1),
    max_grad_norm=1.0,
    delta=1e-3,
    expected_batch_size=4,
    accountant="rdp",
    sample_rate_source="training.global_batch_size / number of training records",
    neighbouring_relation="zero_out",
    target_epsilon=8.0,
    units=40,
)
RECORDS = {"loss": 5.0, "clipped_fraction": 0.5, "norm_p50": 2.0, "throughput(tps)": 321.0}


def take_steps(folder, steps: int, planned: int = 6, caveat: str = ""):
    """Write the ledger's files as a run does that took so many steps."""
    lineage = Lineage(SETTINGS, planned_steps=planned)
    if caveat:
        lineage = not_private(lineage, caveat)
    lineage = (ended if steps == planned else begun)(lineage, folder, steps)
    write(lineage, folder)


def write_scalars(folder, first: int, last: int, **more: float):
    """Write TensorBoard's files as one start does that logs these steps."""
    writer = SummaryWriter(str(folder))
    for step in range(first, last + 1):
        public = {"lr": 1e-3, "epsilon": 1.0, "noise_multiplier": 1.0}
        private = {f"not_private/{name}": value + step / 100 for name, value in RECORDS.items()}
        for tag, value in {**public, **private, **more}.items():
            writer.add_scalar(tag, value, step)
    writer.close()


@pytest.fixture
def run(tmp_path):
    """A finished run of six steps."""
    folder = tmp_path / "SecretPlace" / "out"
    folder.mkdir(parents=True)
    write_config(
        small_config(
            *("--job.dump_folder", str(folder), "--job.description=SecretWords"),
            *("--training.dataset_path=/SecretData/notes", "--training.steps=6"),
        )
    )
    take_steps(folder, 6)
    write_scalars(folder / "tb" / "1", 1, 6)
    return folder


def test_the_page_is_written_below_the_home_folder(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    main([str(run), "--output=~/page.html"])
    assert (tmp_path / "page.html").is_file()


def test_the_owners_page_is_one_file_with_labels(run):
    """It loads nothing, and what follows from records is labelled in words."""
    page = report(str(run))
    for words in ("finished", "6 of 6", "Clipped share", "ε over steps"):
        assert words in page
    assert "membership-inference attack" in page
    assert "5.06" in page  # the last loss
    assert not re.search(r"<(script|link|img|iframe|object)\b|url\([^#]|@import|https?:", page)
    assert len(page.encode()) < 200_000
    figures = re.findall(r"<figcaption>.*?</figcaption>", page)
    public = [f for f in figures if "may be published" in f]
    assert len(figures) - len(public) == sum("not private" in f for f in figures) >= 3
    for row in ("loss", "state"):
        assert re.search(rf">{row}</th><td>[^\n]*not private", page)


def test_text_of_the_user_is_escaped(tmp_path):
    folder = tmp_path / "<script>alert(1)<_script>"
    folder.mkdir()
    write_config(small_config("--job.dump_folder", str(folder)))
    take_steps(folder, 2)
    write_scalars(folder / "tb", 1, 2, **{"not_private/<script>": 1.0})
    page = report(str(folder))
    assert "<script" not in page
    assert html.escape(folder.name) in page


def test_a_later_start_takes_steps_back(tmp_path):
    write_scalars(tmp_path / "20260101-0000", 1, 5)
    (first,) = tmp_path.rglob("events*")
    first.rename(first.with_name("events.out.tfevents.1000000000.host.1.0"))
    write_scalars(tmp_path / "20260101-0001", 4, 6, **{"private_to_publish/loss": 9.0})
    scalars = read_scalars(tmp_path)
    assert [step for step, _ in scalars["loss"]] == [1, 2, 3, 4, 5, 6]
    assert scalars["loss"][-1] == (6, 9.0)
    assert [step for step, _ in scalars[SECONDS]] == [2, 3, 5, 6]


def test_lost_steps_are_counted(run):
    """Epsilon at the end is what a release states."""
    found = open_run(str(run))
    assert found.epsilon_planned == epsilon(found.ledger, found.ledger.left)
    begun(open_run(str(run)).ledger, run, loses=2)
    after = open_run(str(run))
    assert after.epsilon_planned is not None
    assert after.epsilon_planned > (found.epsilon_planned or 0)
    assert after.epsilon == found.epsilon
    published = read_published_fields(str(run))
    write_published(str(run), {**published, "epsilon": 2 * published["epsilon"]})  # a curve's
    assert open_run(str(run)).epsilon == found.epsilon  # as `ledger` finds it
    page = report(str(run))
    for words in ("with lost and planned steps", "…of all steps begun"):
        assert words in page


def test_unfinished_alive_and_without_tensorboard(run, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    (other / RUN_CONFIG_FILE).write_bytes((run / RUN_CONFIG_FILE).read_bytes())
    take_steps(other, 4)
    assert "no scalars were found" in report(str(other))
    main([str(other), "--status"])
    assert "from the start: no checkpoint" in capsys.readouterr().out
    write_scalars(other / "tb", 1, 4)
    with open(other / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        main([str(other), "--status"])
    shown = capsys.readouterr().out
    assert "alive" in shown
    assert re.search(r"step +4 of 6\n", shown)
    assert re.search(r"time left +about 0:00:0\d  \(not private\)", shown)
    assert "(target 8)" in shown
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    take_steps(fresh, 0)
    assert "0 of 6" in report(str(fresh))
    assert "is missing" in report(str(fresh))  # run_config.json


def test_a_run_that_is_not_private(run, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    take_steps(other, 6, caveat="privacy.debug_seed was set")
    write_scalars(other / "tb", 1, 6)
    page = report(str(other))
    assert "NOT private: privacy.debug_seed was set" in page
    assert '<b class="mark may">' not in page
    assert "membership" not in page


def test_damage_is_shown_or_refused(run, capsys):
    (events,) = (run / "tb").rglob("events*")
    whole = events.read_bytes()
    events.write_bytes(whole[: len(whole) // 2] + b"\0" * 99)
    assert "Loss" in report(str(run))
    events.write_bytes(b"no events")
    assert "no scalars were found" in report(str(run))
    (run / RUN_CONFIG_FILE).write_text("{")
    assert "cannot be read" in report(str(run))
    log = run / "steps_executed.log"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    assert "Faults" in report(str(run))
    (run / "privacy.json").write_text("{")
    refused([str(run)], "cannot be read", capsys)


def test_mistakes_are_one_line(run, tmp_path, capsys):
    """And what is no mistake is a file of its owner's."""
    refused([str(tmp_path / "nothing")], "has no privacy.json", capsys)
    refused([str(run), "--output", str(run / "privacy.json")], "ends in .html", capsys)
    refused([str(run), "--output", str(tmp_path / "no" / "x.html")], "cannot be written", capsys)
    main([str(run)])
    assert (run / "report.html").stat().st_mode & 0o077 == 0


def refused(argv: list[str], words: str, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert words in line


@pytest.mark.parametrize("logarithmic", [False, True])
def test_charts_of_odd_values(logarithmic: bool):
    pytest.importorskip("matplotlib")
    lines = {"one": [(1, 0.0)], "many": [(n, n % 7.0) for n in range(100_000)]}
    drawn = Chart("x", "", lines, False, ("C", 1.0), logarithmic).svg
    assert drawn.startswith("<svg")
    assert len(drawn) < 200_000
    assert "http" not in drawn


def test_without_matplotlib_the_page_says_so(run, monkeypatch):
    monkeypatch.setattr(page_of.importlib.util, "find_spec", lambda _: None)
    page = report(str(run))
    assert "torchtitan-dp[report]" in page
    assert "<svg" not in page
