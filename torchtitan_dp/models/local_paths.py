"""Removal of local paths, and of files that stay behind, from JSON that is published.

`transformers` and PEFT record the folder of a model or tokenizer, whose name may reveal whose
records are trained on; and the modules of code beside the weights, which no export has.
"""

import os
import re
from typing import Any

_ROOTED = re.compile(r"/|~|\\\\|[A-Za-z]:[\\/]|file:", re.IGNORECASE)
# Of transformers and PEFT: a path that was relative to another working directory looks like a name.
_PATH_KEYS = frozenset(
    {
        *("_name_or_path", "name_or_path", "base_model_name_or_path"),
        *("tokenizer_file", "special_tokens_map_file", "vocab_file", "merges_file"),
        *("auto_map", "custom_pipelines"),
    }
)


def is_local_path(text: str) -> bool:
    r"""Return whether a text is an absolute path, or a relative one that exists.

    A name without a separator is none, even if such a file exists: "llama" is a model type.

    >>> [is_local_path(t) for t in ("/data/oncology", "~/llama", r"C:\models", "file:///llama")]
    [True, True, True, True]
    >>> [is_local_path(t) for t in ("meta-llama/Llama-3.2-1B", "llama", "<|begin_of_text|>", "")]
    [False, False, False, False]
    """
    if _ROOTED.match(text):
        return True
    separated = "/" in text or os.sep in text
    return separated and "\0" not in text and os.path.exists(text)


def without_local_paths(value: Any) -> Any:
    """Copy a JSON value without paths and the keys for paths, at any depth.

    Guarantee:
        No string of the copy is an absolute path, on Linux, macOS or Windows, nor one that exists
        from the working directory. Keys of objects are kept, and so are texts of which a path is
        only a part. Not for `tokenizer.json`: some of its tokens begin with a slash, and it has no
        paths.
    """
    if isinstance(value, dict):
        return {
            key: without_local_paths(held)
            for key, held in value.items()
            if key not in _PATH_KEYS and not _is_path(held)
        }
    if isinstance(value, list):
        return [without_local_paths(held) for held in value if not _is_path(held)]
    return value


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and is_local_path(value)
