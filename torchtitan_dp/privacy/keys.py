"""Secret keys: one root key a start, and from it one key for each purpose and step.

    root key (32 bytes, from the OS) -> stream key, by label -> 32-byte key of one step

Rank 0 draws the root key at each start and at each checkpoint load and sends it to all ranks. It
lives in memory only: anyone with it and the published weights can subtract the noise.

Guarantee:
    - If HMAC-SHA256 is a pseudo-random function, keys of different (label, step) pairs are
      indistinguishable from independent uniform ones. A root key has one stream for each label,
      which serves each step once, in rising order, so no noise is drawn twice within a process.
      Across processes this assumes a fresh `RootKey.from_os()` at every start and load.
    - No key is saved, or shown by `repr` or pickle; memory that is swapped out or dumped is not
      protected here (the launcher turns core dumps off). A root key from a debug seed can be
      guessed: such a run is not private.
"""

import hashlib
import hmac
import secrets
from typing import Literal, NoReturn, get_args

Label = Literal["sampling", "noise", "window", "projection", "coin", "evaluation"]

KEY_BYTES = 32
_DEBUG_DOMAIN = b"torchtitan_dp/debug_seed/"


class Secret:
    """A secret that must not be printed, pickled, copied or changed."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: secret>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} is secret: it is never pickled, saved or copied")


class KeyStream(Secret):
    """Hands out the keys of one purpose: one for each step, each once, in rising order."""

    __slots__ = ("__key", "__last")

    def __init__(self, key: bytes) -> None:
        self.__key = key
        self.__last = -1

    def take(self, step: int) -> bytes:
        """Return the 32-byte key of `step`, which must exceed every step asked for before, else
        RuntimeError: its noise might repeat, and going back in time needs a fresh root key."""
        assert 0 <= step < 2**64, f"{step=} does not fit 8 bytes"
        if step <= self.__last:
            raise RuntimeError(f"the key of step {step} is spent: the stream is at {self.__last}")
        self.__last = step
        return hmac.digest(self.__key, step.to_bytes(8, "big"), "sha256")


class RootKey(Secret):
    """The 32 secret bytes from which every key of this start is derived."""

    __slots__ = ("__secret", "__streams")
    __secret: bytes
    __streams: dict[str, KeyStream]

    def __init__(self, secret: bytes) -> None:
        assert len(secret) == KEY_BYTES, f"a root key has {KEY_BYTES} bytes, not {len(secret)}"
        object.__setattr__(self, "_RootKey__secret", bytes(secret))
        object.__setattr__(self, "_RootKey__streams", {})

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("a RootKey is frozen")

    @classmethod
    def from_os(cls) -> "RootKey":
        """Draw a fresh key from the operating system's generator."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def from_debug_seed(cls, seed: int) -> "RootKey":
        """Make the key of a reproducible run, which is *not private*: anyone can try the seeds."""
        return cls(hashlib.sha256(_DEBUG_DOMAIN + str(seed).encode()).digest())

    def reveal(self) -> bytes:
        """Return the 32 bytes themselves, for rank 0's broadcast alone."""
        return self.__secret

    def stream(self, label: Label) -> KeyStream:
        """Return the one stream of a purpose: the same object each time, so no key comes twice."""
        assert label in get_args(Label), f"unknown label {label!r}"
        if label not in self.__streams:
            self.__streams[label] = KeyStream(hmac.digest(self.__secret, label.encode(), "sha256"))
        return self.__streams[label]
