"""The small Llama before training: a tokenizer learned from the public text, and a config.json."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 1024
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_BOS, _EOS = "<|begin_of_text|>", "<|end_of_text|>"


def write(folder: Path, public: Path) -> None:
    """Write what `model.hf_assets_path` needs of a model that is not trained yet.

    Args:
        public: a jsonl file; nothing else is learned from.
    """
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[_BOS, _EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (json.loads(line)["text"] for line in public.read_text("utf-8").splitlines())
    backend.train_from_iterator(texts, trainer)
    marks = [(mark, backend.token_to_id(mark)) for mark in (_BOS, _EOS)]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{_BOS} $A", special_tokens=marks
    )
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _BOS,
        "eos_token": _EOS,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    shape = {**SHAPE, "bos_token_id": marks[0][1], "eos_token_id": marks[1][1]}
    (folder / "config.json").write_text(json.dumps(shape, indent=1) + "\n")
