"""`packed-sft`: the command line.

Exit codes: 0 success, 1 the data or the machine is at fault, 2 the command line or a setting is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron_packed_sft._version import __version__
from megatron_packed_sft.cli import convert, env, export, sample_data, validate
from megatron_packed_sft.errors import InvalidInputError, PackedSFTError

_EPILOG = """examples:
  packed-sft sample-data chats
  packed-sft prepare input='chats/*' output=my_dataset tokenizer.path=sp.model template=chatml
  packed-sft train data.path=my_dataset train.steps=100
  packed-sft validate my_dataset
  packed-sft validate my_dataset/train/shard_000000 --level structure --json
  packed-sft convert training_4096.npy shards/shard_000000
  packed-sft convert 'packed/*.npy' my_dataset --pack-size 4096 --overlong error
  packed-sft convert my_dataset legacy_files --to legacy
  packed-sft export runs/sft my_model --dtype bf16
  packed-sft env
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; an error is one sentence on stderr."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        if given and given[0] in _APPLICATIONS:
            return _APPLICATIONS[given[0]](given[1:])
        arguments = _parser().parse_args(given)
        code: int = arguments.run(arguments)
    except PackedSFTError as error:
        print(f"packed-sft: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidInputError) else 1
    except BrokenPipeError:  # the other end of the pipe, such as head, has closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails, too
        return 1
    except KeyboardInterrupt:
        print("packed-sft: interrupted; nothing was published", file=sys.stderr)
        return 130
    return code


class _Parser(argparse.ArgumentParser):
    """A parser whose errors look like all others: one sentence that says what to do."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with 2."""
        self.exit(2, f"packed-sft: error: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="packed-sft",
        description="Packed SFT data for Megatron-style training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"packed-sft {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    # These two are Hydra applications with a --help of their own; they are run before this parser sees them.
    commands.add_parser("prepare", help="chat files to packed, checksummed shards (packed-sft prepare --help)")
    commands.add_parser("train", help="train on packed data with Megatron-Core (packed-sft train --help)")

    for verb in (sample_data, validate, convert, export, env):
        verb.add_parser(commands)
    return parser


def _prepare(argv: Sequence[str]) -> int:
    from megatron_packed_sft.prepare.app import main as prepare

    return prepare(argv)


def _train(argv: Sequence[str]) -> int:
    from megatron_packed_sft.train.app import main as train

    return train(argv)


_APPLICATIONS = {"prepare": _prepare, "train": _train}
