"""What `packed-sft explain-template` does."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.inspect.settings import is_template, prepare_settings, split_words
from megatron_packed_sft.support.terminal import show, show_json, shows_colours


def run_explain(words: Sequence[str], *, tokenizer: str | None = None, as_json: bool = False) -> int:
    """Explain a template, and return the exit code.

    Args:
        words: a tokenizer, a template file or a built-in name, and settings KEY=VALUE.
        tokenizer: the path of the tokenizer that a template is for.
        as_json: print plain values.
    """
    from megatron_packed_sft.encode.templates.load import load_template
    from megatron_packed_sft.encode.tokenizers.interface import Tokenizer
    from megatron_packed_sft.encode.tokenizers.load import load_tokenizer
    from megatron_packed_sft.inspect.explain_template import TemplateExplanation
    from megatron_packed_sft.inspect.painting import Painter
    from megatron_packed_sft.inspect.template_alone import TemplateAlone
    from megatron_packed_sft.inspect.template_view import template_json, template_view

    path, settings = split_words(words)
    named = path if path is not None and is_template(path) else None
    if path is None and tokenizer is None:
        raise InvalidInputError("name a tokenizer, a Jinja file or a built-in template, such as chatml")
    if named is None and path is not None:
        if tokenizer is not None:
            raise InvalidInputError(f"{path} and --tokenizer {tokenizer} are two tokenizers; leave one out")
        tokenizer = path
    config = prepare_settings(settings, tokenizer=tokenizer or "none")
    given = config.tokenizer
    made = None if tokenizer is None else load_tokenizer(given.path, kind=given.kind, fast=False)
    template = load_template(named or config.template.name, made)
    whose: Tokenizer = made if made is not None else TemplateAlone(template)
    logging.getLogger("megatron_packed_sft.encode").setLevel(logging.ERROR)  # what it would warn of is shown
    found = TemplateExplanation(whose, template, config.template)
    if as_json:
        show_json(template_json(found))
    else:
        show(*template_view(found, Painter(whose.control_tokens, in_colour=shows_colours())))
    return 0
