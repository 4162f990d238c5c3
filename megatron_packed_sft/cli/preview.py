"""`packed-sft preview`: what will be trained, before anything is prepared and after."""

from __future__ import annotations

import click

from megatron_packed_sft.cli._verb import argument, complete_words, verb


@verb(
    examples="""
        packed-sft preview chats.jsonl tokenizer.path=Qwen2.5-7B
        packed-sft preview chats.jsonl tokenizer.path=sp.model template=chatml --row 12 --ids
        packed-sft preview 'data/*.jsonl.gz' tokenizer.path=Qwen3-8B encode.max_len=4096 --random 5
        packed-sft preview pairs.parquet tokenizer.path=Qwen3-8B sources.input.take=chosen
        packed-sft preview my_dataset --bin 3
        packed-sft preview my_dataset --split validation --random 2 --tokenizer Qwen2.5-7B
        packed-sft preview my_dataset.work/tokens/train --sequence 0 --json
        packed-sft preview token_files --tokenizer Qwen2.5-7B --seq-length 4096 --pack-sequences
    """
)
@argument(
    "words",
    nargs=-1,
    shell_complete=complete_words,
    metavar="PATH [KEY=VALUE ...]",
    help="a file of chats (anything that prepare reads), with prepare's keys; or packed data: a dataset directory, a "
    "shard, a packed file, a token store or a token stream; or a URL of these",
)
@click.option("--row", type=int, metavar="N", help="of chats: line or record N, counted from 1 (default: the first)")
@click.option("--bin", "bin_number", type=int, metavar="N", help="of packed data: bin N, counted from 0 (default: 0)")
@click.option("--sample", type=int, metavar="N", help="of packed data: sample N in the shuffled order of a dataset")
@click.option("--sequence", type=int, metavar="N", help="of a token store: sequence N, counted from 0 (default: 0)")
@click.option("--random", "count", type=int, metavar="K", help="K records, bins or sequences by lot")
@click.option("--seed", type=int, metavar="S", help="of --random (default: another draw each time) and --sample (1234)")
@click.option("--split", metavar="NAME", help="of a dataset directory (default: train)")
@click.option("--tokenizer", metavar="PATH", help="the tokenizer, as tokenizer.path, or if packed data's is not found")
@click.option("--plan", metavar="FILE", help="of a token store: show the bins of this plan")
@click.option("--work-dir", metavar="DIR", help="where a dataset was prepared, if not beside it: tells file and line")
@click.option("--seq-length", type=int, metavar="N", help="of a token stream: predictions of a window (default: 2048)")
@click.option("--pack-sequences", is_flag=True, default=None, help="of a token stream: tell its documents apart")
@click.option("--eos-id", type=int, metavar="ID", help="of a token stream: the id that ends a document, if nobody says")
@click.option("--ids", is_flag=True, help="one token per line, with position, id, weight and kind")
@click.option("--config-name", metavar="NAME", help="prepare's settings from a file of your own, NAME.yaml")
@click.option("--config-dir", metavar="DIR", help="where that file is")
def command(**given: object) -> int:
    """Show what will be trained: trained text green, given text dim, control tokens marked; brackets in a pipe.

    A record is shown exactly as `packed-sft prepare` with the same keys will tokenize it, with the turns that were
    found in the template, what is cut, escaped or lost, and why it would be dropped. Packed data is shown bin by bin,
    sequence by sequence.
    """
    from megatron_packed_sft.inspect.preview import PreviewRequest, run_preview

    return run_preview(PreviewRequest(**given))  # type: ignore[arg-type]
