"""`privacy.json` is what its schema says, and anybody can account for it again."""

import json
from collections import namedtuple

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from tests.accounts import mechanism, publish
from torchtitan_dp.ledger import Lineage, Settings, read_published, schema
from torchtitan_dp.ledger.lineage import Ancestor
from torchtitan_dp.ledger.schema import Origin, names
from torchtitan_dp.privacy.meaning import Meaning

TERMS = ("privacy.sample_rate", "add_remove")
SETTINGS = Settings(mechanism(1.0, 0.02), 0.5, 1e-5, 32, "pld", *TERMS)


OF_OTHERS = {"bands", "column", "round_steps"}  # of correlated noise, of rounds


@pytest.fixture
def told(tmp_path):
    return publish(Lineage(SETTINGS, steps=30, planned_steps=30), tmp_path)


def edit(folder, **changes):
    path = folder / "privacy.json"
    content = json.loads(path.read_text()) | changes
    kept = {key: value for key, value in content.items() if value is not ...}
    path.write_text(json.dumps(kept))


def test_it_holds_the_keys_of_the_schema_in_their_order(told, tmp_path):
    keys = [key.name for key in schema.KEYS if key.origin is not Origin.RELEASE]
    keys = [key for key in keys if key not in OF_OTHERS]
    assert list(told) == keys
    assert list(json.loads((tmp_path / "privacy.json").read_text())) == keys
    assert told["format"] == 1
    schema.check(json.loads((tmp_path / "privacy.json").read_text()))


def test_every_attribute_of_a_ledger_is_told_or_known_otherwise():
    """Who adds one decides whether `privacy.json` tells of it."""
    otherwise = {"settings", "caveats", "step_names", "start", "lost"}
    assert set(names(Origin.LEDGER)) == set(Lineage.__dataclass_fields__) - otherwise
    described = {*names(Origin.SETTINGS, Origin.MECHANISM)}
    assert described - OF_OTHERS == set(SETTINGS.fields())


def test_a_release_leaves_out_what_is_not_released():
    assert "audit" not in names(released=True)
    assert set(names(released=True)) | set(names(released=False)) == set(names())


@pytest.mark.parametrize(
    "change, said",
    [
        ({"format": ...}, "its format is one that had no number yet"),
        ({"format": 2}, "its format is 2, and this version of torchtitan_dp reads format 1"),
        ({"units": ...}, "it lacks 'units'"),
        ({"steps": "30"}, "'steps' is '30'"),
        ({"private": 1}, "'private' is 1"),
        ({"epsilon": True}, "'epsilon' is True"),
        ({"caveats": [1]}, r"'caveats' is \[1\]"),
    ],
)
def test_another_format_or_type_is_refused_in_one_line(told, tmp_path, change, said):
    edit(tmp_path, **change)
    with pytest.raises(ValueError, match=said) as refused:
        read_published(str(tmp_path))
    assert "\n" not in str(refused.value)
    assert str(tmp_path / "privacy.json") in str(refused.value)


def test_a_ledger_of_another_format_in_a_checkpoint_is_refused():
    kept = json.loads(Lineage(SETTINGS).to_json())
    assert kept.pop("format") == 1
    with pytest.raises(ValueError, match="a ledger of format None, and this version"):
        Lineage.from_json(json.dumps(kept))


def test_what_is_computed_is_complete():
    with pytest.raises(AssertionError):
        schema.assemble(Lineage(SETTINGS), {"epsilon": 1.0})


# As docs/privacy_json.md has it.


def named_tuple(value):
    if isinstance(value, list):
        return [named_tuple(one) for one in value]
    if not isinstance(value, dict):
        return value
    fields = {name: named_tuple(one) for name, one in value.items()}
    return namedtuple("Event", fields)(**fields)


@pytest.mark.slow
@pytest.mark.parametrize("planned", [20, 400])
def test_dp_accounting_alone_gives_the_same_epsilon(tmp_path, planned):
    louder = Settings(mechanism(2.0, 0.1), 0.5, 1e-5, 32, "pld", *TERMS)
    behind = Ancestor("before", louder, " ".join(map(str, range(10))))
    publish(Lineage(SETTINGS, steps=20, planned_steps=planned, ancestors=(behind,)), tmp_path)
    told = json.loads((tmp_path / "privacy.json").read_text())
    event = dp_accounting.DpEvent.from_named_tuple(named_tuple(told["dp_event"]))
    theirs = PLDAccountant().compose(event).get_epsilon(told["delta"])
    assert told["epsilon_planned"] == pytest.approx(theirs, rel=2e-3)
    assert (told["epsilon_planned"] > 1.5 * told["epsilon"]) == (planned > 20)


def test_without_noise_there_is_no_event(tmp_path):
    silent = Lineage(Settings(mechanism(0.0, 0.02), 0.5, 1e-5, 32, "pld", *TERMS), steps=1)
    told = publish(silent.marked_not_private("no noise"), tmp_path)
    assert (told["dp_event"], told["meaning"], told["epsilon"]) == (None, None, None)
    assert told["assumptions"] == []


def test_the_meaning_is_of_the_planned_steps_and_is_read_back(tmp_path):
    few = publish(Lineage(SETTINGS, steps=30, planned_steps=30), tmp_path)["meaning"]
    many = publish(Lineage(SETTINGS, steps=30, planned_steps=400), tmp_path)["meaning"]
    assert Meaning.from_json(few).to_json() == few
    assert few["posterior_from_half"] < many["posterior_from_half"]


def test_the_program_is_told():
    from torchtitan_dp.ledger.account import source

    told = source()
    assert told["name"] == "torchtitan-dp"
    assert told["commit"] is None or len(told["commit"]) == 40
    assert set(told) == {"name", "version", "commit", "modified"}
