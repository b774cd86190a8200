"""How what was released is loaded and checked: the last section of its card."""

USE = """
## Use and check it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")  # this folder
tokenizer = AutoTokenizer.from_pretrained(".")
```

`sha256sum -c SHA256SUMS` checks the files; `privacy.json` has the numbers above for programs, not
rounded.
"""

USE_ADAPTERS = """
## Use and check it

The adapters belong to the model that training started from (`base_model`), whose weights they leave
as they are.

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained("BASE MODEL")
model = PeftModel.from_pretrained(base, ".")  # this folder
tokenizer = AutoTokenizer.from_pretrained(".")
```

`sha256sum -c SHA256SUMS` checks the files; `privacy.json` has the numbers above for programs, not
rounded.
"""
