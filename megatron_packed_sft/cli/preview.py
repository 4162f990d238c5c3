"""`packed-sft preview`: show what will be trained, before or after preparing."""

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
    help="a file of chats (anything that prepare reads) with prepare's keys, or packed data: a dataset directory, "
    "shard, packed file, token store or token stream; or the URL of any of them",
)
@click.option("--row", type=int, metavar="N", help="chats: line or record N, counted from 1 (default: the first)")
@click.option("--bin", "bin_number", type=int, metavar="N", help="packed data: bin N, counted from 0 (default: 0)")
@click.option("--sample", type=int, metavar="N", help="packed data: sample N in the shuffled order of a dataset")
@click.option("--sequence", type=int, metavar="N", help="token stores: sequence N, counted from 0 (default: 0)")
@click.option("--random", "count", type=int, metavar="K", help="K records, bins or sequences chosen at random")
@click.option(
    "--seed",
    type=int,
    metavar="S",
    help="for --random (default: a new one each time) or --sample (default: 1234)",
)
@click.option("--split", metavar="NAME", help="datasets: the split (default: train)")
@click.option(
    "--tokenizer",
    metavar="PATH",
    help="the tokenizer (packed data: found where it was prepared, by default)",
)
@click.option("--plan", metavar="FILE", help="token stores: show the bins of this plan")
@click.option(
    "--work-dir",
    metavar="DIR",
    help="datasets: prepare's work directory, for file and line (default: DATASET.work)",
)
@click.option("--seq-length", type=int, metavar="N", help="token streams: predictions per window (default: 2048)")
@click.option("--pack-sequences", is_flag=True, default=None, help="token streams: treat each document as a sequence")
@click.option(
    "--eos-id",
    type=int,
    metavar="ID",
    help="token streams: the id that ends a document, if it is not recorded",
)
@click.option("--ids", is_flag=True, help="one token per line, with position, id, weight and kind")
@click.option("--config-name", metavar="NAME", help="chats: take prepare's settings from NAME.yaml")
@click.option("--config-dir", metavar="DIR", help="chats: the folder of that file")
def command(**given: object) -> int:
    """Show what will be trained: trained text is green, given text dim, control tokens are marked. In a pipe, brackets
    replace the colours.

    A record is shown exactly as `packed-sft prepare` with the same keys will tokenize it: its turns, what is cut,
    escaped or lost, and why it would be dropped. Packed data is shown bin by bin, sequence by sequence.
    """
    from megatron_packed_sft.inspect.preview import preview
    from megatron_packed_sft.inspect.settings import PreviewRequest

    return preview(PreviewRequest(**given))  # type: ignore[arg-type]
