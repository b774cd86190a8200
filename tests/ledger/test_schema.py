"""`privacy.json` is what its schema says, and anybody can account for it again."""

import json
import math
from collections import namedtuple

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from tests.accounts import edit, export, mechanism, publish
from torchtitan_dp.ledger import Lineage, Settings, read_published, schema
from torchtitan_dp.ledger.lineage import Ancestor
from torchtitan_dp.privacy.meaning import Meaning

TERMS = ("privacy.sample_rate", "add_remove")
SETTINGS = Settings(mechanism(1.0, 0.02), 0.5, 1e-5, 32, "pld", *TERMS)
OF_OTHERS = {"bands", "column", "round_steps"}  # of correlated noise, of rounds


@pytest.fixture
def told(tmp_path):
    return publish(Lineage(SETTINGS, steps=30, planned_steps=30), tmp_path)


def test_it_holds_the_keys_of_the_schema_in_their_order(told, tmp_path):
    keys = [key.name for key in schema.KEYS if key.in_runs and key.name not in OF_OTHERS]
    assert list(told) == keys
    assert list(json.loads((tmp_path / "privacy.json").read_text())) == keys
    assert told["format"] == 1
    released = export(Lineage(SETTINGS, steps=30, run="r"), tmp_path / "hf")
    keys = [key.name for key in schema.KEYS if key.in_releases and key.name not in OF_OTHERS]
    assert list(released) == keys
    assert "audit" not in keys
    names = {export(Lineage(SETTINGS, run="r"), tmp_path / "hf")["run"] for _ in range(3)}
    assert len(names) == 3  # of exports, by which they count
    assert all(name.startswith("r/") for name in names)


def test_every_attribute_of_a_ledger_is_told_or_known_otherwise():
    """Who adds one decides whether `privacy.json` tells of it."""
    keys = {key.name for key in schema.KEYS}
    assert set(Lineage.__dataclass_fields__) - keys == {"settings", "start", "lost"}
    assert set(SETTINGS.fields()) <= keys


@pytest.mark.parametrize(
    "change, said",
    [
        ({"format": ...}, "its format is None"),
        ({"format": 2}, "its format is 2, and this version of torchtitan_dp reads 1"),
        ({"units": ...}, "it lacks 'units'"),
        ({"steps": "30"}, "'steps' is '30'"),
        ({"private": 1}, "'private' is 1"),
        ({"epsilon": True}, "'epsilon' is True"),
        ({"epsilon": math.nan}, "NaN is no number"),
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
    with pytest.raises(ValueError, match="ledger format None, not"):
        Lineage.from_json(json.dumps(kept))


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
    behind = Ancestor("before", louder, 10, 10, 0)
    publish(Lineage(SETTINGS, steps=20, planned_steps=planned, ancestors=(behind,)), tmp_path)
    told = json.loads((tmp_path / "privacy.json").read_text())
    event = dp_accounting.DpEvent.from_named_tuple(named_tuple(told["dp_event"]))
    theirs = PLDAccountant().compose(event).get_epsilon(told["delta"])
    assert told["epsilon_planned"] == pytest.approx(theirs, rel=2e-3)
    assert (told["epsilon_planned"] > 1.5 * told["epsilon"]) == (planned > 20)


def test_the_meaning_is_of_the_planned_steps_and_is_read_back(tmp_path):
    few = publish(Lineage(SETTINGS, steps=30, planned_steps=30), tmp_path)["meaning"]
    many = publish(Lineage(SETTINGS, steps=30, planned_steps=400), tmp_path)["meaning"]
    assert Meaning.from_json(few).to_json() == few
    assert few["posterior_from_half"] < many["posterior_from_half"]
