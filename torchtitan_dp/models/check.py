"""Whether the model, its files and its tokenizer fit together, found out before anything runs."""

from torchtitan_dp.checkpoint.start import Start
from torchtitan_dp.config import JobConfig
from torchtitan_dp.data.tokenizer import load_tokenizer
from torchtitan_dp.models.families import ModelArgs
from torchtitan_dp.models.hugging_face import origin, shape
from torchtitan_dp.models.hugging_face_weights import check_files


def check_model(config: JobConfig, start: Start) -> ModelArgs:
    """Return the shape of the model that a run trains.

    Args:
        start: from `decide_start`, which says what is loaded into it.

    Raises:
        ValueError: one line for the user: it is none of ours, its files do not fit it, or its
            tokenizer has ids that the vocabulary lacks (a record with one would end the run).
    """
    args = shape(config)
    check_files(config, args, start)
    tokens = load_tokenizer(config.model.hf_assets_path).get_vocab_size()
    if tokens > args.vocab_size:
        raise ValueError(
            f"model.hf_assets_path = '{config.model.hf_assets_path}': its tokenizer has {tokens} "
            f"tokens, more than the {args.vocab_size} of {origin(config)}; use the model's own "
            "tokenizer"
        )
    return args
