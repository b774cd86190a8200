"""Chat templates and tokenizers' folders, made here: bytes, with marks for turns."""

import json
from pathlib import Path

import tokenizers

from torchtitan_dp.release.__main__ import BYTE_TOKENIZER

START, END = "<|start|>", "<|end|>"
# As the templates of Llama 3 and ChatML are made: an end mark, trimmed contents, roles.
EACH, ROLE = "{% for message in messages %}", "{{ '<|start|>' + message['role'] + '\n' }}"
LAST = "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
PLAIN = (
    "{{ bos_token }}" + EACH + "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no such role: ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|start|>' + message['role'] + '\n' + message['content'] | trim + '<|end|>\n' }}" + LAST
)
MARKED = (
    "{{ bos_token }}" + EACH + ROLE + "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] | trim }}{{ '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] | trim }}{{ '<|end|>' }}{% endif %}{{ '\n' }}" + LAST
)
# Shows the thoughts of the last turn only: what it wrote of a turn changes with the next.
SHOWN = "{{ message['content'] if loop.last else message['content'][:2] }}{{ '<|end|>' }}"
REWRITES = EACH + ROLE + SHOWN + LAST


def folder(path: Path, template: str | None = PLAIN) -> str:
    """A folder with a tokenizer of 260 ids, and the template in its settings, if any."""
    path.mkdir(parents=True, exist_ok=True)
    settings = json.loads((BYTE_TOKENIZER / "tokenizer_config.json").read_text())
    if template is not None:
        settings["chat_template"] = template
    backend = tokenizers.Tokenizer.from_file(str(BYTE_TOKENIZER / "tokenizer.json"))
    backend.add_special_tokens([START, END])
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(path)


def chat(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """Turns of user and assistant, in this order."""
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)
    ]
    return turns if system is None else [{"role": "system", "content": system}, *turns]
