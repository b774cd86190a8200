"""The tokenizer of bytes as the files of a released model."""

import json

import tokenizers


def byte_tokenizer_files() -> dict[str, str]:
    """Write `ByteTokenizer` as the files that `transformers` reads it from: name -> text.

    The ids are the same, and a beginning mark comes first, as in training. A text that spells out
    one of the two marks is read as that mark.
    """
    bos, eos = "<|begin_of_text|>", "<|end_of_text|>"
    # The characters that tokenizers' ByteLevel writes bytes as: GPT-2's table.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    characters |= {chr(256 + i): byte for i, byte in enumerate(others)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(characters, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([bos, eos])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, 256), (eos, 257)]
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": backend.to_str(pretty=True) + "\n",
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
    }
