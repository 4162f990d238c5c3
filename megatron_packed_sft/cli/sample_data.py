"""`packed-sft sample-data`: synthetic chats for trying things out."""

from __future__ import annotations

import click

from megatron_packed_sft.cli._verb import argument, quiet_option, verb


@verb(
    examples="""
        packed-sft sample-data chats
        packed-sft sample-data chats --rows 5000 --seed 7
    """
)
@argument("directory", help="where to write the files; created if missing")
@click.option("--rows", type=int, default=2000, metavar="N", show_default=True, help="records in all files together")
@click.option("--seed", type=int, default=0, metavar="N", show_default=True, help="seed of the chats")
@quiet_option
def command(directory: str, rows: int, seed: int, quiet: bool, as_json: bool) -> int:
    """Write synthetic but natural chats: single and multi turn, system prompts, tools, many lengths. The same seed
    gives the same bytes.
    """
    from megatron_packed_sft.records.samples.sample_chats import write_sample_data
    from megatron_packed_sft.support.terminal import show_json

    files = write_sample_data(directory, num_records=rows, seed=seed)
    if as_json:
        show_json({"files": [{"path": str(file), "num_bytes": file.stat().st_size} for file in files]})
    elif not quiet:
        for file in files:
            print(f"{file}: {file.stat().st_size:,} bytes")
    return 0
