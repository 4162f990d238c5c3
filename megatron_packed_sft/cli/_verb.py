"""What all verbs share: --json, --debug, --help with examples. A verb is one file, such as

    @verb(examples="packed-sft count my_dataset")
    @argument("path", help="a dataset directory")
    @quiet_option
    def command(path: str, quiet: bool, as_json: bool) -> int:
        '''Count the bins of a dataset.'''
        from ... import count_bins    # here and not at the top: --help must stay fast
        ...
        return 0

and a line in the table VERBS of cli/main.py. The function returns the exit code; errors are raised.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

WIDTH = 110  # of --help, on a terminal that is as wide


class Argument(click.Argument):
    """A positional argument that --help explains."""

    def __init__(self, *declarations: Any, help: str, **attributes: Any) -> None:
        super().__init__(*declarations, **attributes)
        self.meaning = help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return its name and its meaning."""
        return self.metavar or self.human_readable_name, self.meaning


class Helpful(click.Command):
    """A command whose --help ends with examples."""

    examples = ""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the arguments, then the options."""
        for title, kind in (("arguments", click.Argument), ("options", click.Option)):
            found = [one.get_help_record(ctx) for one in self.get_params(ctx) if isinstance(one, kind)]
            records = [record for record in found if record is not None]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples as they stand."""
        lines = inspect.cleandoc(self.examples).splitlines()
        formatter.write("\nexamples:\n" + "".join(f"  {line}".rstrip() + "\n" for line in lines))

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return --help with our own description."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.help = "show this help"
        return option


class ApplicationVerb(click.Command):
    """A verb that passes all of its words, --help included, to an application configured by KEY=VALUE.

    Args:
        run: takes the words after the verb and returns the exit code.
        complete: takes the words so far and the beginning of the next one, and returns its completions.
    """

    def __init__(
        self, name: str, *, run: Callable[[Sequence[str]], int], complete: Callable[[Sequence[str], str], list[str]]
    ) -> None:
        super().__init__(name, callback=lambda words: run(words), add_help_option=False)
        self._complete = complete

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep all words unparsed."""
        ctx.params["words"] = ctx.args = list(args)
        return ctx.args

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete keys, group names and options; where there are none, file names."""
        found = self._complete(ctx.args, incomplete)
        return [CompletionItem(one) for one in found] or [CompletionItem(incomplete, type="file")]


def verb(*, examples: str) -> Callable[[Callable[..., int]], Helpful]:
    """Turn a function into a command with the options that all verbs have; its docstring is the description."""

    def decorate(function: Callable[..., int]) -> Helpful:
        command = click.command(cls=Helpful, context_settings={"max_content_width": WIDTH})(function)
        command.examples = examples
        command.params += [json_option(), debug_option()]
        return command

    return decorate


def argument(name: str, *, help: str, metavar: str | None = None, **attributes: Any) -> Callable[[Any], Any]:
    """Add a positional argument; a path by default, which the shell completes."""
    attributes = {"type": click.Path(), **attributes}
    decorator: Callable[[Any], Any] = click.argument(name, cls=Argument, help=help, metavar=metavar, **attributes)
    return decorator


def complete_words(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a path first, and after it the keys of `packed-sft prepare`."""
    words = list(context.params.get(parameter.name or "") or ())
    if words:
        from megatron_packed_sft.prepare.app import complete

        found = [] if incomplete.startswith("-") else complete(words, incomplete)
        if found:
            return [CompletionItem(one) for one in found]
    return [CompletionItem(incomplete, type="file")]


def quiet_option(function: Any) -> Any:
    """Add --quiet."""
    return click.option("--quiet", is_flag=True, help="no progress bar and no summary")(function)


def json_option() -> click.Option:
    """Return --json."""
    return click.Option(["--json", "as_json"], is_flag=True, help="print the result as JSON on stdout")


def debug_option() -> click.Option:
    """Return --debug. `main` looks for it by itself, so that it also works for a wrong command line."""
    return click.Option(["--debug"], is_flag=True, expose_value=False, help="show the traceback of an error")
