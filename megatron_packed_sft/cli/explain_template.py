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
@click.option("--tokenizer", metavar="PATH", help="the tokenizer that a template is for, if a template was named")
def command(words: tuple[str, ...], tokenizer: str | None, as_json: bool) -> int:
    """Show what a chat template writes around each kind of turn, an example, and what it loses or refuses.

    All of it is found by rendering small chats, as `packed-sft prepare` renders records.
    """
    from megatron_packed_sft.inspect.explain_template_view import run_explain

    return run_explain(words, tokenizer=tokenizer, as_json=as_json)
