"""`packed-sft report`: write an HTML page about packed data or a training run."""

from __future__ import annotations

import click

from megatron_packed_sft.cli._verb import argument, quiet_option, verb


@verb(
    examples="""
        packed-sft report my_dataset
        packed-sft report my_dataset -o report.html --ranks 8 --global-batch-size 256
        packed-sft report training_4096.npy --tokenizer Qwen2.5-7B --bin 77
        packed-sft report runs/first
    """
)
@argument(
    "source",
    metavar="DATASET_OR_RUN",
    help="a dataset directory, a shard or packed file of any storage, a directory of shards, or the URL of one of "
    "them; or a run's output directory",
)
@click.option("-o", "--output", type=click.Path(), metavar="FILE", help="the page (default: NAME.report.html here)")
@click.option(
    "--tokenizer",
    type=click.Path(),
    metavar="PATH",
    help="the data's tokenizer (default: found where it was prepared)",
)
@click.option(
    "--work-dir", type=click.Path(), metavar="PATH", help="the work directory of prepare (default: DATASET.work)"
)
@click.option(
    "--global-batch-size", type=int, metavar="N", help="bins per step (default: what the data was packed for)"
)
@click.option("--ranks", type=int, metavar="N", help="data-parallel ranks that share a step (default: up to 8)")
@click.option("--bin", "bins", type=int, multiple=True, metavar="N", help="include this bin; may be repeated")
@quiet_option
def command(
    source: str,
    output: str | None,
    tokenizer: str | None,
    work_dir: str | None,
    global_batch_size: int | None,
    ranks: int | None,
    bins: tuple[int, ...],
    quiet: bool,
    as_json: bool,
) -> int:
    """Write one self-contained HTML page about packed data or a training run.

    It opens from disk, loads nothing from a network, and can be sent as a file. The same data gives the same bytes.
    """
    from dataclasses import asdict

    from megatron_packed_sft.inspect.report.write import write_report
    from megatron_packed_sft.support.terminal import show_json
    from megatron_packed_sft.support.wording import byte_count, plural

    report = write_report(
        source,
        output,
        tokenizer=tokenizer,
        work_dir=work_dir,
        global_batch=global_batch_size,
        ranks=ranks,
        bins=bins,
    )
    if as_json:
        show_json(asdict(report))
    elif not quiet:
        shown = ""
        if report.num_bins is not None and report.num_suspicious is not None:
            suspicious = plural(sum(report.num_suspicious.values()), "suspicious sequence")
            shown = f", {report.num_bins_shown:,} of {plural(report.num_bins, 'bin')}, {suspicious}"
        print(f"{report.path}: {byte_count(report.num_bytes)}{shown}")
        for note in report.notes:
            print(f"note: {note}")
    return 0
