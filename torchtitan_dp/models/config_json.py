"""Reading a `config.json`: a key that a family does not support is refused by name."""

import json
from collections.abc import Iterable
from typing import Any, NoReturn

from torchtitan_dp.models.rope import LinearScaling, Scaling, Yarn, mscale

Supported = Iterable[tuple[str, tuple[Any, ...], str]]
"""Keys of a `config.json`, the values that a family computes, and what else they would mean."""


class Reader:
    """The values of one `config.json`, checked as they are read.

    Raises:
        ValueError: in each method, one line for the user that names the key.
    """

    def __init__(self, settings: dict[str, Any], path: str, key: str, supported: Supported) -> None:
        """Read `settings`, the file's content; `path` and `key`, of its folder, are for
        messages."""
        self.settings, self.path, self.key = settings, path, key
        for name, values, why in supported:
            if settings.get(name) not in values:
                self.refuse(name, settings.get(name), why)

    def args(self, window: int, *kinds: str) -> dict[str, Any]:
        """Read the arguments of a decoder; `window` is the family's default of
        `max_position_embeddings`, `kinds` the types of RoPE's scaling that it computes."""
        heads, kv_heads = self.heads()
        theta, kind, name, values = self.rope(*kinds)
        return {
            "dim": self.size("hidden_size"),
            "n_layers": self.size("num_hidden_layers"),
            "n_heads": heads,
            "n_kv_heads": kv_heads,
            "vocab_size": self.size("vocab_size"),
            "norm_eps": float(self.settings.get("rms_norm_eps", 1e-6)),
            "rope_theta": theta,
            "rope": self.scaling(kind, name, values),
            "max_seq_len": self.size("max_position_embeddings", window),
            "tie_embeddings": bool(self.settings.get("tie_word_embeddings", False)),
        }

    def size(self, name: str, default: int | None = None) -> int:
        value = self.settings.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(name, value, "must be a whole number, 1 or more")
        return value

    def heads(self) -> tuple[int, int]:
        """Read the numbers of heads of queries and of keys."""
        heads = self.size("num_attention_heads")
        kv_heads = self.size("num_key_value_heads", heads)
        if heads % kv_heads != 0:
            self.refuse("num_key_value_heads", kv_heads, f"must divide the {heads} heads")
        return heads, kv_heads

    def rope(self, *kinds: str) -> tuple[float, str, str, dict[str, Any]]:
        """Read RoPE of transformers 5's `rope_parameters` or the keys before it: theta; the
        scaling's type, one of `kinds`, its key and its values."""
        older, newer = (self.settings.get(key) for key in ("rope_scaling", "rope_parameters"))
        if older and newer and older != newer:
            self.refuse("rope_scaling", older, "rope_parameters has another; keep one of the two")
        name = "rope_parameters" if newer else "rope_scaling"
        values = self.settings.get(name) or {}
        if not isinstance(values, dict):
            self.refuse(name, values, "must be an object")
        kind = values.get("rope_type", values.get("type", "default"))
        if kind not in kinds:
            built = " and ".join(f"'{kind}'" for kind in kinds)
            only = f"only {built} {'are' if len(kinds) > 1 else 'is'} built"
            self.refuse(f"{name}.rope_type", kind, only)
        for holder, prefix in ((self.settings, ""), (values, f"{name}.")):
            if (part := holder.get("partial_rotary_factor", 1)) != 1:
                self.refuse(f"{prefix}partial_rotary_factor", part, "must be 1")
        theta = values.get("rope_theta", self.settings.get("rope_theta", 10000.0))
        if not is_positive(theta):
            self.refuse("rope_theta", theta, "must be a positive number")
        return float(theta), kind, name, values

    def scaling(self, kind: str, name: str, values: dict[str, Any]) -> Scaling | None:
        """Read the scaling that `rope` found, if it is one of those that all families compute."""

        def number(part: str, default: float | None = None, least: float = 0) -> float:
            value: Any = default if values.get(part) is None else values[part]
            if not is_positive(value) or value < least:
                wanted = f"a number of {least} or more" if least else "a positive number"
                self.refuse(f"{name}.{part}", values.get(part), f"must be {wanted}")
            return float(value)

        if kind == "linear":
            return LinearScaling(number("factor", least=1))
        if kind != "yarn":
            return None
        window, key = self.size("max_position_embeddings"), "original_max_position_embeddings"
        original = self.size(key, int(number(key, window)))
        # A `factor` of null is transformers' way to leave it to the two windows.
        factor = number("factor", window / original if "factor" in values else None, least=1)
        attention = None
        if values.get("attention_factor") is not None:
            attention = number("attention_factor")
        elif values.get("mscale") and values.get("mscale_all_dim"):
            over, under = (mscale(factor, number(part)) for part in ("mscale", "mscale_all_dim"))
            attention = over / under
        fast, slow = number("beta_fast", 32), number("beta_slow", 1)
        if fast < slow:
            self.refuse(f"{name}.beta_fast", fast, f"must be at least beta_slow = {slow:g}")
        truncate = values.get("truncate", True)
        if not isinstance(truncate, bool):
            self.refuse(f"{name}.truncate", truncate, "must be true or false")
        return Yarn(factor, original, fast, slow, attention, truncate)

    def refuse(self, name: str, value: object, why: str) -> NoReturn:
        """Raise ValueError for a key's value."""
        shown = "missing" if value is None else json.dumps(value)
        raise ValueError(
            f"{self.key}: {self.path} has {name} = {shown}: {why}; use a model that has it so (for "
            "the tokenizer alone, copy its files into a folder without config.json)"
        )


def is_positive(value: object) -> bool:
    """Return whether a value is a positive number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
