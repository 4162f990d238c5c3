"""Completion by the shell: bash, zsh and fish ask the program itself, through click's protocol."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import click
from click.shell_completion import BashComplete, add_completion_class, get_completion_class, shell_complete

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.support.atomic import os_errors

COMPLETION_VARIABLE = "_PACKED_SFT_COMPLETE"
SHELLS = ("bash", "zsh", "fish")
_FROM_ENVIRONMENT = "the shell in $SHELL"


class _Bash(BashComplete):
    """Bash, without a blank after KEY=, and with the words as they were typed: bash cuts them at `=`."""

    source_template = BashComplete.source_template.replace(
        "    return 0\n", "    [[ ${COMPREPLY[0]-} == *= ]] && compopt -o nospace\n    return 0\n", 1
    )


add_completion_class(_Bash)


def answer_shell(command: click.Command, program: str, instruction: str) -> int:
    """Answer what a shell asks by its environment: the script to source, or completions."""
    return shell_complete(command, {}, program, COMPLETION_VARIABLE, instruction)


def _script(program: click.Context, shell: str) -> str:
    found = get_completion_class(shell)
    assert found is not None
    return found(program.command, {}, program.info_name or "", COMPLETION_VARIABLE).source()


def _show(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None and not context.resilient_parsing:
        click.echo(_script(context, _chosen(value, "--show-completion")), nl=False)
        context.exit()


def _install(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None and not context.resilient_parsing:
        shell = _chosen(value, "--install-completion")
        script = _script(context, shell)
        path, startup = _places(shell)
        _written(path, lambda text: script)
        if startup is not None:
            line = f"source {path}"
            _written(startup, lambda text: text if line in text.splitlines() else f"{text.rstrip()}\n{line}\n".lstrip())
        click.echo(f"wrote {path}{f' and a line in {startup}' if startup else ''}; open a new {shell} to use it")
        context.exit()


def _chosen(value: str, option: str) -> str:
    shell = Path(os.environ.get("SHELL", "")).name if value == _FROM_ENVIRONMENT else value
    if shell not in SHELLS:
        raise InvalidInputError(f"{option} knows {', '.join(SHELLS)}, not {shell or 'your shell'}; write {option} bash")
    return shell


def _places(shell: str) -> tuple[Path, Path | None]:
    """Return where the script goes, and the file that must source it; fish finds it by itself."""
    home = Path.home()
    if shell == "fish":
        return Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "fish/completions/packed-sft.fish", None
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share")
    return data / f"packed-sft/completion.{shell}", home / f".{shell}rc"


def _written(path: Path, change: Callable[[str], str]) -> None:
    with os_errors("write", path):
        before = path.read_text() if path.exists() else ""
        path.parent.mkdir(parents=True, exist_ok=True)
        if (after := change(before)) != before:
            path.write_text(after)


COMPLETION_OPTIONS = [
    click.Option(
        [option],
        is_flag=False,
        flag_value=_FROM_ENVIRONMENT,
        metavar="[SHELL]",
        is_eager=True,
        expose_value=False,
        callback=callback,
        help=f"{what} ({', '.join(SHELLS)}; default: the one in $SHELL)",
    )
    for option, what, callback in (
        ("--install-completion", "let the shell complete this command", _install),
        ("--show-completion", "print the script that does so", _show),
    )
]
