"""How what was released is loaded and checked: the last section of its card."""

_SUMS = """
`sha256sum -c SHA256SUMS` checks the files; `privacy.json` has the numbers above for programs, not
rounded.
"""

_WHOLE = """
## Use and check it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")  # this folder
tokenizer = AutoTokenizer.from_pretrained(".")
```
"""

_ADAPTERS = """
## Use and check it

The adapters belong to the model that training started from, whose weights they leave as they are.

```python
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained(".")  # this folder; loads {base_model} too
tokenizer = AutoTokenizer.from_pretrained(".")
```
"""

_ADAPTERS_OF_SOMETHING = """
## Use and check it

The adapters belong to the model that training started from, whose weights they leave as they are.
This folder does not name it (`--base_model` of `python -m torchtitan_dp.release` would have), so it
is loaded first:

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained("BASE MODEL")  # TO FILL IN: its name, or its folder
model = PeftModel.from_pretrained(base, ".")  # this folder
tokenizer = AutoTokenizer.from_pretrained(".")
```
"""


def use_section(*, adapters: bool, base_model: str | None) -> str:
    """Return the card's section on how to load a whole model, or adapters."""
    if not adapters:
        return _WHOLE + _SUMS
    if base_model is None:
        return _ADAPTERS_OF_SOMETHING + _SUMS
    return _ADAPTERS.format(base_model=base_model) + _SUMS
