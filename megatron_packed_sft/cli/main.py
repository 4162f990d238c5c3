"""`packed-sft`: the command line.

Exit codes: 0 success, 1 the data or the machine is at fault, 2 the command line or a setting is wrong, 130 Ctrl-C.
Each verb is a file beside this one, imported when it is called (cli/_verb.py shows the pattern).
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

import click

from megatron_packed_sft._version import __version__
from megatron_packed_sft.cli._verb import WIDTH, Helpful, debug_option
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.support.exits import run_command
from megatron_packed_sft.support.terminal import never_fail_on_characters

PROGRAM = "packed-sft"
_COMPLETION_VARIABLE = "_PACKED_SFT_COMPLETE"
# The verbs in the order of --help. `sample-data` is the `command` of cli/sample_data.py.
VERBS = {
    "sample-data": "write synthetic chats in several file formats, for trying things out",
    "preview": "show in colour what will be trained, of chats or of packed data",
    "explain-template": "show what a chat template writes around each kind of turn, and what it loses",
    "prepare": "turn chat files into packed, checksummed shards",
    "train": "train on packed data with Megatron-Core",
    "info": "describe a dataset, shard, packed file, token store, plan, checkpoint or run",
    "report": "write an HTML page about packed data or a training run",
    "validate": "check a shard or a dataset: checksums, structure, every bin",
    "compare": "compare two datasets, shards or packed files, bin by bin",
    "convert": "convert packed data from one storage to another",
    "cache": "show, fill and clear the node's cache of shards fetched from object stores",
    "export": "write a trained model as a Hugging Face folder",
    "env": "print versions, machine and plugins, for a bug report",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; an error is one sentence on stderr."""
    never_fail_on_characters()
    given = list(sys.argv[1:] if argv is None else argv)
    if instruction := os.environ.get(_COMPLETION_VARIABLE):
        return _answer_shell(instruction)
    return run_command(lambda: _run(given), name=PROGRAM, debug="--debug" in given)


def _run(given: list[str]) -> int:
    try:
        with command_line.make_context(PROGRAM, given) as context:
            code: int = command_line.invoke(context)
            return code
    except click.exceptions.Exit as done:  # --help, --version
        return done.exit_code
    except click.UsageError as error:
        verb = next((word for word in given if word in VERBS), "")
        raise InvalidInputError(_sentence(error, f"{PROGRAM} {verb}".strip())) from error


def _answer_shell(instruction: str) -> int:
    """Answer bash, zsh or fish through click's protocol: the script to source, or completions."""
    from click.shell_completion import BashComplete, add_completion_class, shell_complete

    class Bash(BashComplete):
        # Without this, bash writes a blank after `packing.pack_size=`.
        source_template = BashComplete.source_template.replace(
            "    return 0\n", "    [[ ${COMPREPLY[0]-} == *= ]] && compopt -o nospace\n    return 0\n", 1
        )

    add_completion_class(Bash)
    return shell_complete(command_line, {}, PROGRAM, _COMPLETION_VARIABLE, instruction)


class _Verbs(Helpful, click.Group):
    """The verbs, each imported when it is needed."""

    examples = """
        packed-sft sample-data chats --tokenizer sp.model
        packed-sft preview chats/chats.jsonl tokenizer.path=sp.model template=chatml
        packed-sft prepare input='chats/*' output=my_dataset tokenizer.path=sp.model template=chatml
        packed-sft train data.path=my_dataset train.steps=100
        packed-sft report my_dataset -o report.html
        packed-sft validate my_dataset
        packed-sft convert 'packed/*.npy' my_dataset --pack-size 4096 --overlong error
        packed-sft export runs/sft my_model --dtype bf16
        packed-sft validate --help
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"megatron_packed_sft.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        command.short_help = VERBS[cmd_name]
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in VERBS and not ctx.resilient_parsing and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], VERBS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(VERBS)}"
            raise InvalidInputError(f"{args[0]} is not a command; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("commands"):
            formatter.write_dl(list(VERBS.items()))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        Helpful.format_options(self, ctx, formatter)


def _sentence(error: click.UsageError, called: str) -> str:
    """Return what is wrong with the command line, and what to do."""
    see = f"see {called} --help"
    if isinstance(error, click.NoSuchOption):
        near = difflib.get_close_matches(error.option_name, error.possibilities or [], n=1)
        return f"{error.option_name} is not an option; {f'did you mean {near[0]}?' if near else see}"
    if isinstance(error, click.MissingParameter) and error.param is not None:
        name = error.param.metavar if error.param.param_type_name == "argument" else error.param.opts[0]
        return f"{name or error.param.human_readable_name} is missing; {see}"
    message = error.message.rstrip(".")
    if isinstance(error, click.BadParameter) and error.param is not None and error.param.opts:
        return f"{error.param.opts[0]}: {message}; {see}"
    return f"{message[:1].lower()}{message[1:]}; {see}"


def _no_verb(context: click.Context) -> None:
    if context.invoked_subcommand is None:
        raise InvalidInputError(f"no command was given; see {PROGRAM} --help")


command_line = _Verbs(
    PROGRAM,
    callback=click.pass_context(_no_verb),
    invoke_without_command=True,
    help="Packed SFT data for Megatron-style training.",
    context_settings={"max_content_width": WIDTH},
    params=[debug_option()],
)
click.version_option(__version__, prog_name=PROGRAM, message="%(prog)s %(version)s", help="print the version")(
    command_line
)
