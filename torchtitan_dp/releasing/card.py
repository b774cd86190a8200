"""The model card of a release: its guarantee in words, made from the ledger's terms.

Guarantee:
    The card holds the terms that it is handed, fixed text, and settings from an allow-list: no
    path, name or number that records decide. Epsilon is rounded up.
"""

import math
from typing import Any

from torchtitan_dp.config import JobConfig
from torchtitan_dp.data.tokenizer import ByteTokenizer, load_tokenizer
from torchtitan_dp.ledger.initial import PUBLIC
from torchtitan_dp.models.hugging_face import parameter_count
from torchtitan_dp.models.llama3 import LlamaArgs
from torchtitan_dp.privacy.accounting import rounded_up

_FRONT = """---
# license: name one before you publish; whether you may depends on your data and starting weights
library_name: transformers
pipeline_tag: text-generation
tags:
- differential-privacy
- dp-sgd
---
"""
_ACCOUNTANTS = {
    "prv": "the upper end of the error bar of Opacus' PRV accountant",
    "rdp": "Opacus' Renyi accountant, an upper bound",
    "pld": "the privacy loss distributions of Google's dp-accounting, rounded pessimistically",
}
_RECORDS = {"text": "one file", "jsonl": "one line of a JSON Lines file"}
_NEIGHBOURS = {
    "zero_out": (
        "trained with the content of that {unit} replaced by an empty one",
        "`zero_out`: one {unit}'s content is replaced by an empty one. How many there are is "
        "treated as public.",
    ),
    "add_remove": (
        "trained without that {unit}",
        "`add_remove`: one {unit} more or less.",
    ),
}


def model_card(terms: dict[str, Any], config: JobConfig, args: LlamaArgs) -> str:
    """Markdown with Hugging Face's front matter.

    Args:
        terms: as `releasing.claims.claims` returns them.
        config: the run's, of which public settings are told.
    """
    sections = (
        _guarantee(terms, config),
        _not_said(terms, config),
        _computation(terms),
        _assumptions(terms, config),
        _training(terms, config, args),
        _use(),
    )
    count = parameter_count(args)
    size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
    title = f"# A Llama of {size} parameters, trained with differential privacy"
    return "\n".join([_FRONT, title, "", *(section.strip() + "\n" for section in sections)])


def _guarantee(terms: dict[str, Any], config: JobConfig) -> str:
    epsilon, delta, unit = terms["epsilon_executed"], terms["delta"], terms["privacy_unit"]
    relation = terms["neighbouring_relation"]
    other, says = (text.format(unit=unit) for text in _NEIGHBOURS[relation])
    what = f" ({_RECORDS[config.training.dataset]})" if _is_plain(unit, config) else ""
    return f"""
**These weights are (ε, δ)-differentially private for one {unit}, with ε = {rounded_up(epsilon)}
and δ = {delta:g}.**

## What this means

Take any one {unit}{what} of the training data, and think of a second model, {other}.
Whatever someone looks for in these weights, or in what the model writes, and whatever else they
know: they find it at most {_factor(epsilon)} times (e^ε) as often as with the second model, and
the other way round, but for a probability of {delta:g} (δ). That bounds what the weights reveal
about any one {unit}, and nothing that is done with them later loosens the bound.

| | |
| --- | --- |
| privacy unit | one {unit}{what} |
| neighbouring data sets | {says} |
| ε | {rounded_up(epsilon)} (rounded up) |
| δ | {delta:g} |
| mechanism | DP-SGD: Poisson sampling, each {unit}'s gradient clipped, Gaussian noise |

Smaller is stronger. As a guide, Ponomareva et al. (How to DP-fy ML, 2023) call ε up to 1 strong, up
to 10 reasonable, and above that weak. δ should be well below 1 / number of units.
"""


def _is_plain(unit: str, config: JobConfig) -> bool:
    return unit == "record" and config.training.dataset in _RECORDS


def _factor(epsilon: float) -> str:
    """e^epsilon, rounded up."""
    if epsilon < 20:
        return rounded_up(math.exp(epsilon), digits=3)
    return f"10^{math.ceil(epsilon / math.log(10))}"


def _not_said(terms: dict[str, Any], config: JobConfig) -> str:
    unit = terms["privacy_unit"]
    heldout = ""
    if config.data.heldout_fraction > 0:
        heldout = (
            f"- **Held-out data.** {config.data.heldout_fraction:g} of the data was never trained "
            "on. What was decided by looking at the loss on it is outside the guarantee.\n"
        )
    return f"""
## What it does not say

- **Several of one person.** The guarantee is for one {unit}. For somebody with k of them it is kε
  in place of ε, and k e^((k-1)ε) δ in place of δ.
- **Another content.** For one {unit} replaced by *another* of its kind, ε doubles and δ becomes
  (1 + e^ε) δ.
- **What many say.** A text that stands in many of the training data may be learned and repeated.
- **Choosing among runs.** ε is that of this one run. If it, its settings or the moment to stop were
  chosen by looking at results on the private data (the training loss, say), or if other models of
  the same data are published, that costs more, and is not counted here. What several runs cost
  together is computed from their folders by `python -m torchtitan_dp.ledger RUN...`.
{heldout}- **Anything outside this folder.** Logs, losses, gradient norms, batch sizes and timing
  are made from the data without noise. They are not part of this release.
- **Quality.** Privacy says nothing of whether the model is right, fair or safe.
"""


def _computation(terms: dict[str, Any]) -> str:
    steps, executed, unit = terms["steps"], terms["steps_executed"], terms["privacy_unit"]
    batch = terms["expected_batch_size"]
    accountant = f"`{terms['accountant']}`: {_ACCOUNTANTS[terms['accountant']]}"
    if terms["adaptive"]:
        accountant = "a Renyi filter, at an order and against a budget fixed at the first start"
    return f"""
## How ε was computed

| | |
| --- | --- |
| noise multiplier σ | {terms["noise_multiplier"]:.6g} |
| sampling rate q | {terms["sample_rate"]:.6g}, from {terms["sample_rate_source"]} |
| clipping norm C | {terms["max_grad_norm"]:g} |
| steps of these weights | {steps} |
| steps counted | {executed} |
| accountant | {accountant} |
{_segments(terms)}
In each step every {unit} takes part with probability q, by a draw of its own; its gradient is
clipped to norm C; noise of standard deviation σC is added once to the sum, in every coordinate; and
the sum is divided by a constant, the expected batch of {batch}. ε covers every step that the run
ever began, also those lost in a crash or repeated: hence "steps counted". From these numbers any
accountant of the Poisson-sampled Gaussian mechanism can check ε.
"""


def _segments(terms: dict[str, Any]) -> str:
    """Rows for what came before the terms above; nothing if they held all along."""
    earlier = [s for ancestor in terms["ancestors"] for s in ancestor["segments"]]
    earlier += terms["segments"][:-1]
    return "".join(
        f"| before that | {s['steps']} steps with σ = {s['settings']['noise_multiplier']:.6g}, "
        f"q = {s['settings']['sample_rate']:.6g} |\n"
        for s in earlier
    )


def _assumptions(terms: dict[str, Any], config: JobConfig) -> str:
    checkpoint = config.checkpoint
    # A resumed run's configuration need not name them again.
    loaded = checkpoint.initial_load_path or checkpoint.initial_load_in_hf
    loaded = loaded or PUBLIC in terms["caveats"]
    if terms["ancestors"]:
        start = (
            "The weights that training started from saw the same data, with privacy: their steps "
            "are counted in ε."
        )
    elif loaded:
        start = (
            "The weights that training started from were given. What they themselves may reveal "
            "of the same data is not counted, unless it is said below."
        )
    else:
        start = "Training started from random weights of a public seed."
    tokens = (
        "The tokenizer was given, and is taken as public: it must not have been learned from the "
        "private data."
        if not isinstance(load_tokenizer(config.model.hf_assets_path), ByteTokenizer)
        else "Text is read as bytes: no tokenizer was learned."
    )
    caveats = "".join(f"- Recorded by the run: {caveat}.\n" for caveat in terms["caveats"])
    return f"""
## What it rests on

- {start}
- {tokens}
- Model, settings and number of steps were fixed without looking at the private data, and σ, q, C,
  the expected batch and the number of steps are public, as this card is.
- Draws and noise come from counter-based generators (Philox, Threefry) with secret 128-bit keys
  from the operating system, never stored. They are not proven cryptographic generators.
- The mathematics is that of real numbers; training used floating point. Attacks on the low bits of
  the noise, on timing, or on the machine that trained are not covered.
- The program, torchtitan_dp on TorchTitan, does what it says: it is tested, not proven.
{caveats}"""


def _training(terms: dict[str, Any], config: JobConfig, args: LlamaArgs) -> str:
    optimizer, schedule, training = config.optimizer, config.lr_scheduler, config.training
    rows = {
        "model": f"Llama, {args.n_layers} layers of {args.dim}, {args.n_heads} heads, "
        f"{args.vocab_size} tokens" + (", tied embeddings" if args.tie_embeddings else ""),
        "sample": f"at most {training.seq_len} tokens of one {terms['privacy_unit']} in a step",
        "expected batch": terms["expected_batch_size"],
        "optimizer": f"{optimizer.name}, betas {optimizer.beta1:g} and {optimizer.beta2:g}, "
        f"eps {optimizer.eps:g}, weight decay {optimizer.weight_decay:g}",
        "learning rate": f"{optimizer.lr:g}; warm-up {schedule.warmup_steps} steps, "
        f"{schedule.decay_type} decay to {schedule.min_lr_factor:g} of it",
        "planned steps": training.steps,
        "clipping": f"{config.privacy.clipping}, {config.privacy.clip_function}",
        "precision": f"{training.mixed_precision_param}; {training.mixed_precision_reduce} "
        "reduction, norms and noise",
    }
    lines = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""
## How it was trained

Settings of the run's last start. If they were tuned on the private data, see "Choosing among runs".

| | |
| --- | --- |
{lines}
"""


def _use() -> str:
    return """
## Use and check it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")  # this folder
tokenizer = AutoTokenizer.from_pretrained(".")
```

`sha256sum -c SHA256SUMS` checks the files; `privacy.json` has the numbers above for programs, not
rounded.

<!-- For whoever publishes this: say what the data is, what the model is for and how well it does on
public data; name license and base_model (what training started from) in the front matter. -->
"""
