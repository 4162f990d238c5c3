"""A tokenizer in which the text of a control token is ordinary text.

`tokenizers` recognises added tokens wherever they stand, and some models know them as words too. So the control tokens
get private names of the same length; the text gets the private name where a control token is meant, and what merely
looks like one is left as it is. Nothing else changes: the same ids, the same positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_packed_sft.encode.tokenizers._byte_level import merge_product

# Code points that no one may give a meaning to, and that no normalizer touches.
_FIRST, _LAST = 0xF0000, 0xFFFFD
_FILLER = "\U0010fffd"


def private_names(control_tokens: Iterable[str]) -> dict[str, str]:
    """A name of private characters for each control token, as long as the token itself.

    Example:
        >>> names = private_names(["<s>", "</s>"]); [len(name) for name in names.values()]
        [3, 4]
    """
    names = {}
    for code, token in zip(range(_FIRST, _LAST + 1), control_tokens, strict=False):
        names[token] = chr(code) + _FILLER * (len(token) - 1)
    return names


def renamed(document: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A tokenizer.json whose control tokens have other names, in its vocabulary as well.

    Example:
        >>> renamed({"model": {"vocab": {"a": 0, "<s>": 1}}, "added_tokens": []}, {"<s>": "?"})["model"]["vocab"]
        {'a': 0, '?': 1}
    """
    model = dict(document["model"])
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(token, token), *rest] for token, *rest in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if merge_product(merge) not in names]
    added = [{**token, "content": names.get(token["content"], token["content"])} for token in document["added_tokens"]]
    return {**document, "model": model, "added_tokens": added}
