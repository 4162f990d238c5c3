"""`packed-sft explain-template`: what a chat template writes, and what it loses."""

from __future__ import annotations

import click

from megatron_packed_sft.cli._verb import argument, complete_words, verb


@verb(
    examples="""
        packed-sft explain-template Qwen3-8B
        packed-sft explain-template my_template.jinja
        packed-sft explain-template sp.model template=chatml
        packed-sft explain-template Qwen3-8B template.variables.enable_thinking=false --json
    """
)
@argument(
    "words",
    nargs=-1,
    shell_complete=complete_words,
    metavar="TOKENIZER [KEY=VALUE ...]",
    help="a tokenizer's folder or .model file, a Jinja file, or a built-in template; with prepare's keys template.*",
)
@click.option("--tokenizer", metavar="PATH", help="the tokenizer to render a named template with")
def command(words: tuple[str, ...], tokenizer: str | None, as_json: bool) -> int:
    """Show what a chat template writes around each kind of turn, an example, and what it loses or refuses.

    It renders small chats in the way `packed-sft prepare` renders records, and describes the result.
    """
    from megatron_packed_sft.inspect.explain_template_view import explain_template

    return explain_template(words, tokenizer=tokenizer, as_json=as_json)
