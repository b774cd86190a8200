"""The model card of a release: the values for its text, `card.md.j2` and `questions.j2`.

Guarantee:
    The card has the given terms, fixed text, and the settings that its template names: no path,
    name or number that depends on records; `PublicNames` are the owner's. No claim is rounded in
    its own favour: epsilon, its consequences and q are rounded up, sigma is rounded down, and delta
    and C are exact.
"""

import math
from pathlib import Path
from typing import Any

from torchtitan_dp.checkpoint.start import PUBLIC
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import AS_GIVEN, rope_in_words
from torchtitan_dp.data.formats import FORMATS
from torchtitan_dp.data.tokenizer import ByteTokenizer, load_tokenizer
from torchtitan_dp.ledger.lineage import Ancestor
from torchtitan_dp.ledger.schema import in_words
from torchtitan_dp.models.causal_lm.settings import ModelArgs
from torchtitan_dp.models.hugging_face import parameter_count, without_lora
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.privacy.meaning import Meaning
from torchtitan_dp.privacy.segments import Mechanism
from torchtitan_dp.release.claims import NO_NAMES, PublicNames
from torchtitan_dp.templates import templates


def model_card(
    terms: dict[str, Any],
    config: JobConfig,
    args: ModelArgs,
    *,
    decay: float | None = None,
    names: PublicNames = NO_NAMES,
) -> str:
    """Write Markdown with Hugging Face's front matter.

    Of a model with `args.lora` its adapters alone are released; `decay` is that of the released
    average of weights, None for the last step's weights.
    """
    # The ledger's entry counts, too: the configuration is the last start's, which may have resumed.
    given = config.checkpoint.initial_load_in_hf
    rope, count = rope_in_words(config), parameter_count(without_lora(args))
    return _TEMPLATES.get_template("card.md.j2").render(
        terms=terms,
        mechanism=Mechanism.from_fields(terms),
        in_words=in_words,
        args=args,
        family=args.title,
        size=f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M",
        adapters=args.lora is not None,
        rope=None if rope == AS_GIVEN else rope,
        names=names,
        **guarantee(terms, config, unit_name=names.unit_name),
        lost=terms["steps_executed"] - terms["steps"],
        heldout_fraction=config.data.heldout_fraction,
        earlier=[Ancestor.from_fields(fields) for fields in terms["ancestors"]],
        given=given or any(caveat.endswith(PUBLIC) for caveat in terms["caveats"]),
        reads_bytes=isinstance(load_tokenizer(config.model.hf_assets_path), ByteTokenizer),
        decay=decay,
        seq_len=config.training.seq_len,
        dtypes=(config.training.mixed_precision_param, config.training.mixed_precision_reduce),
        optimizer=config.optimizer,
        schedule=config.lr_scheduler,
    )


def guarantee(
    terms: dict[str, Any], config: JobConfig | None, *, unit_name: str | None = None
) -> dict[str, Any]:
    """Return the values of the guarantee in words, `meaning.j2`; without the run's `config` the
    kind of unit is not described."""
    unit = unit_name or str(terms["privacy_unit"]).split()[0]
    kind = ""
    if config is not None:
        field, record = config.data.unit_field, FORMATS[config.training.dataset].record
        kind = f" (all records with one value of `{field}`)" if field else f" ({record})"
    return {
        "unit": unit,
        "kind_of_unit": kind,
        "factor": _factor(terms["epsilon"]),
        "meaning": Meaning.from_json(terms["meaning"]).sentences(unit),
    }


def _factor(epsilon: float) -> str:
    """Write e^epsilon, rounded up."""
    if epsilon < 20:
        return rounded_up(math.exp(epsilon), digits=3)
    return f"10^{math.ceil(epsilon / math.log(10))}"


_TEMPLATES = templates(Path(__file__).parent)
OWNER_ITEMS: dict[str, str] = vars(_TEMPLATES.get_template("questions.j2").module)["OWNER_ITEMS"]
"""Questions that the card asks and only the owner can answer."""
