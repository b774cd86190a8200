"""Keys: each (purpose, step) once, all distinct, nothing of them shown or saved."""

import copy
import hashlib
import hmac
import os
import pickle
from typing import get_args

import pytest

from torchtitan_dp.privacy import keys
from torchtitan_dp.privacy.keys import Label, RootKey

ROOT = bytes(range(32))


def test_derivation_is_hmac_of_hmac():
    stream = hmac.new(ROOT, b"noise", hashlib.sha256).digest()
    expected = hmac.new(stream, (7).to_bytes(8, "big"), hashlib.sha256).digest()
    assert RootKey(ROOT).stream("noise").take(7) == expected


def test_a_step_is_served_once_and_only_forwards():
    """Asking for the stream again does not rewind it."""
    root = RootKey(ROOT)
    stream = root.stream("noise")
    stream.take(0)
    stream.take(5)
    for step in (5, 4, 0):
        for again in (stream, root.stream("noise")):
            with pytest.raises(RuntimeError, match=f"step {step} is spent"):
                again.take(step)
    assert stream.take(6) != RootKey(ROOT).stream("noise").take(5)


def test_labels_steps_and_roots_give_distinct_keys():
    keys = set()
    for root in (RootKey(ROOT), RootKey.from_os(), RootKey.from_os(), RootKey.from_debug_seed(0)):
        for label in get_args(Label):
            stream = root.stream(label)
            keys.update(stream.take(step) for step in range(10))
    assert len(keys) == 4 * len(get_args(Label)) * 10
    assert {len(key) for key in keys} == {32}


def test_every_bit_of_the_root_counts():
    keys = {RootKey(ROOT).stream("noise").take(1)}
    for bit in range(256):
        flipped = (int.from_bytes(ROOT, "big") ^ (1 << bit)).to_bytes(32, "big")
        keys.add(RootKey(flipped).stream("noise").take(1))
    assert len(keys) == 257


def test_row39_a_root_key_is_32_bytes_of_the_operating_systems_generator(monkeypatch):
    """All of them: fewer, stretched to 32, would look the same from outside."""
    drawn = []

    def record(count):
        drawn.append(os.urandom(count))
        return drawn[-1]

    monkeypatch.setattr(keys.secrets, "token_bytes", record)
    roots = [RootKey.from_os().reveal() for _ in range(3)]
    assert roots == drawn
    assert all(len(root) == 32 for root in roots)


def test_debug_seed_is_reproducible_and_seeds_differ():
    first, again, other = (RootKey.from_debug_seed(seed) for seed in (3, 3, -3))
    assert first.reveal() == again.reveal() != other.reveal()
    assert RootKey(first.reveal()).stream("coin").take(1) == first.stream("coin").take(1)


def test_nothing_shows_or_saves_a_key():
    root = RootKey(ROOT)
    stream = root.stream("noise")
    for secret in (root, stream):
        for text in (repr(secret), str(secret), f"{secret}"):
            assert text == f"<{type(secret).__name__}: secret>"
        for save in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="never pickled"):
                save(secret)
        assert not hasattr(secret, "__dict__")


def test_root_is_frozen_and_has_32_bytes():
    with pytest.raises(AttributeError):
        RootKey(ROOT).secret = b""
    with pytest.raises(AssertionError):
        RootKey(b"short")
