"""Chat files to something that training can read: ours beside `datasets.map` with TRL-style tokenization.

python -m benchmarks.prepare --tokenizer /path/to/Qwen2.5-7B --data ../shared/data

Both sides read the same JSONL of `messages` with the same tokenizer and chat template, in one process. The peer renders
and tokenizes each chat with its assistant mask, as TRL's trainer does, and lets `datasets` write Arrow files; it does
not pack. Ours scans, encodes, plans, writes, checksums, fsyncs and publishes.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import PeakOfOwnMemory, in_own_process, peak_megabytes, print_table
from tests.real_data import DATA, tokenizer_folder

FILES = (
    "gsm8k_train.messages.jsonl.gz",
    "gsm8k_test.messages.jsonl",
    "taskmaster4.messages.jsonl",
    "oasst_en100.messages.jsonl",
    "gpteacher.alpaca.jsonl.gz",
)
# Plain chats, short and long, and chats with tools.
PARTS_OF = (
    "gsm8k_train.messages.jsonl.gz",
    "gpteacher.alpaca.jsonl.gz",
    "taskmaster4.messages.jsonl",
    "sgd_tools.messages.jsonl.gz",
)
# The template both sides use; the peer needs the marks, or its mask is all zero.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
)
PACK_SIZE = 4096


def _lines(path: Path) -> list[bytes]:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()


def gather(data: Path, target: Path, times: int = 1) -> int:
    """One JSONL of role and content, for both sides; returns the number of bytes."""
    from megatron_packed_sft.records.schemas.registry import adapter

    to_chat: Any = adapter()
    rows = [to_chat(json.loads(line)).messages for name in FILES for line in _lines(data / name)]
    with open(target, "w") as out:
        for number in range(times):
            for messages in rows:
                kept = [{"role": one["role"], "content": one["content"]} for one in messages]
                if number:  # copies must differ, or caches would help
                    kept[0]["content"] = f"{number} {kept[0]['content']}"
                out.write(json.dumps({"messages": kept}) + "\n")
    return target.stat().st_size


def peer_case(tokenizer_path: str, jsonl: str, home: str) -> dict[str, float]:
    """datasets.map, one row at a time, as TRL's SFTTrainer tokenizes; one process."""
    os.environ |= {"HF_HOME": home, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    start = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)

    def tokenize(row: dict[str, Any]) -> dict[str, Any]:
        encoded = tokenizer.apply_chat_template(
            row["messages"],
            chat_template=TEMPLATE,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        return {"input_ids": encoded["input_ids"], "assistant_masks": encoded["assistant_masks"]}

    rows = datasets.load_dataset("json", data_files=jsonl, split="train", cache_dir=home)
    done = rows.map(tokenize, remove_columns=rows.column_names)
    seconds = time.perf_counter() - start
    lengths = [len(ids) for ids in done["input_ids"]]
    return {"seconds": seconds, "tokens": sum(lengths), "megabytes": peak_megabytes()}


def ours_case(tokenizer_path: str, jsonl: str, home: str, num_workers: int, fast: bool) -> dict[str, float]:
    """The whole of `packed-sft prepare`."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from megatron_packed_sft import pack
    from megatron_packed_sft.encode.options import TemplateOptions
    from megatron_packed_sft.prepare.config import ExecutorConfig, PrepareConfig, SourceConfig, TokenizerConfig
    from megatron_packed_sft.prepare.pipeline import Pipeline

    pack([4, 3, 2, 1], pack_size=8)  # compiled once per machine, not once per run
    config = PrepareConfig(
        output=f"{home}/data",
        work_dir=f"{home}/work",
        sources={"chats": SourceConfig(path=jsonl)},
        tokenizer=TokenizerConfig(path=tokenizer_path, fast=fast),
        template=TemplateOptions(TEMPLATE),
        executor=ExecutorConfig(num_workers=num_workers),
        quiet=True,
    )
    config.packing.pack_size = PACK_SIZE
    shutil.rmtree(home, ignore_errors=True)
    start = time.perf_counter()
    with PeakOfOwnMemory() as own:
        report = Pipeline(config).run()
    seconds = time.perf_counter() - start
    tokens = sum(split.num_tokens for split in report.total.splits.values())
    return {"seconds": seconds, "tokens": tokens, "megabytes": peak_megabytes(), "own megabytes": own.megabytes}


def bare_case(tokenizer_path: str, jsonl: str, fast: bool) -> dict[str, float]:
    """The tokenizer's own calls on texts rendered before: no pipeline can be faster."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import tokenizers

    from megatron_packed_sft.encode.tokenizers.interface import load_tokenizer

    texts = []
    with open(jsonl) as lines:
        for line in lines:
            turns = (f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in json.loads(line)["messages"])
            texts.append("".join(turns))
    if fast:
        loaded: Any = load_tokenizer(tokenizer_path)
        encode = loaded._gigatoken.encode
        encode(["warm up"])
        start = time.perf_counter()
        for first in range(0, len(texts), 256):
            encode(texts[first : first + 256])
    else:
        backend = tokenizers.Tokenizer.from_file(f"{tokenizer_path}/tokenizer.json")
        backend.encode_batch(["warm up"])
        start = time.perf_counter()
        for first in range(0, len(texts), 256):
            backend.encode_batch(texts[first : first + 256], add_special_tokens=False)
    return {"seconds": time.perf_counter() - start}


def encode_case(tokenizer_path: str, jsonl: str, fast: bool) -> dict[str, float]:
    """The encode stage in this process, without writing: parse, adapt, render, tokenize, mask."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from megatron_packed_sft.encode.options import EncodeOptions, TemplateOptions
    from megatron_packed_sft.encode.tokenizers.interface import load_tokenizer
    from megatron_packed_sft.prepare.encode_stage import slice_tasks
    from megatron_packed_sft.prepare.encode_worker import EncodeSettings, SliceEncoder
    from megatron_packed_sft.prepare.sources import Source, SplitRule, scan

    settings = EncodeSettings(
        tokenizer=load_tokenizer(tokenizer_path, fast=fast),
        template=TemplateOptions(TEMPLATE),
        options=EncodeOptions(),
        split_rule=SplitRule(),
        tokens=None,
    )
    encoder = SliceEncoder(settings)
    warm_up = Path(jsonl).with_name("warm_up.jsonl")
    warm_up.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    encoder.encode(next(slice_tasks(scan([Source("chats", (str(warm_up),))]))))
    tasks = list(slice_tasks(scan([Source("chats", (jsonl,))])))
    start = time.perf_counter()
    for task in tasks:
        encoder.encode(task)
    return {"seconds": time.perf_counter() - start}


def parts_case(tokenizer_path: str, path: str) -> dict[str, float]:
    """The encode stage of one file by part, in seconds of this process: the best of three, with everything learnt."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from megatron_packed_sft.encode.options import EncodeOptions, TemplateOptions
    from megatron_packed_sft.encode.templates.renderer import RecordRefusedError
    from megatron_packed_sft.encode.tokenizers.interface import load_tokenizer
    from megatron_packed_sft.prepare.encode_stage import slice_tasks
    from megatron_packed_sft.prepare.encode_worker import EncodeSettings, SliceEncoder, read_records
    from megatron_packed_sft.prepare.sources import Source, SplitRule, scan
    from megatron_packed_sft.records.slices import read_slice

    with tempfile.TemporaryDirectory() as place:
        tokenizer = load_tokenizer(tokenizer_path)
        settings = EncodeSettings(
            tokenizer, TemplateOptions(), EncodeOptions(), SplitRule(), Path(place, "tokens"), max_errors=1_000_000
        )
        encoder = SliceEncoder(settings)
        tasks = list(slice_tasks(scan([Source("chats", (path,))])))
        records: list[Any] = [one.record for task in tasks for _, one in read_records(task) if hasattr(one, "record")]
        texts: list[Any] = []

        def mark() -> None:
            texts.clear()
            for record in records:
                with contextlib.suppress(RecordRefusedError):
                    texts.append(encoder._encoder.mark(record))

        def tokenize() -> None:
            for first in range(0, len(texts), 256):
                tokenizer.encode_many(texts[first : first + 256])

        def best(work: Callable[[], object]) -> float:
            times = []
            for _ in range(3):
                start = time.process_time()
                work()
                times.append(time.process_time() - start)
            return min(times)

        start = time.process_time()
        for task in tasks:
            encoder.encode(task)
        found = {"cold": time.process_time() - start}
        found["stage"] = best(lambda: [encoder.encode(task) for task in tasks])
        found["parse"] = best(lambda: [list(read_slice(task.slice)) for task in tasks])
        found["adapt, hash"] = best(lambda: [list(read_records(task)) for task in tasks]) - found["parse"]
        found["mark"] = best(mark)
        found["tokenize"] = best(tokenize)
        named = sum(found[name] for name in ("parse", "adapt, hash", "mark", "tokenize"))
        return found | {"store, rest": found["stage"] - named, "megabytes": sum(len(one.text) for one in texts) / 1e6}


def main(argv: Sequence[str] | None = None) -> None:
    """Run every case one after the other and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=str(DATA), help="folder of chats")
    parser.add_argument("--tokenizer", help="a Hugging Face tokenizer's folder (default: Qwen2.5's, by npm)")
    parser.add_argument("--times", type=int, default=1, help="repeat the chats N times")
    arguments = parser.parse_args(argv)
    data = Path(arguments.data)
    if not all((data / name).exists() for name in FILES):
        sys.exit(f"{data} does not hold {', '.join(FILES)}; give --data")
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        tokenizer = arguments.tokenizer or str(tokenizer_folder("qwen2_5"))
        jsonl, tenfold = home / "chats.jsonl", home / "tenfold.jsonl"
        size = gather(data, jsonl, arguments.times)
        tenfold_size = gather(data, tenfold, 10 * arguments.times)
        _end_to_end(tokenizer, str(jsonl), home, size)
        _end_to_end(tokenizer, str(tenfold), home, tenfold_size, only_one_process=True)
        _encode_stage(tokenizer, str(jsonl))
        _encode_parts(arguments.tokenizer or str(tokenizer_folder("qwen3")), data)
        _growth(tokenizer, str(jsonl), str(tenfold), home)


def _end_to_end(tokenizer: str, jsonl: str, home: Path, size: int, *, only_one_process: bool = False) -> None:
    arguments = {
        "packed-sft prepare, Hugging Face path": (1, False),
        "packed-sft prepare": (1, True),
        "packed-sft prepare, 2 processes": (2, True),
    }
    if only_one_process:
        arguments = {"packed-sft prepare": (1, True)}
    cases = {"datasets.map, TRL-style (no packing)": in_own_process(peer_case, tokenizer, jsonl, str(home / "hf"))}
    for name, (num_workers, fast) in arguments.items():
        cases[name] = in_own_process(ours_case, tokenizer, jsonl, str(home / "ours"), num_workers, fast)
    peer = next(iter(cases.values()))
    assert len({case["tokens"] for case in cases.values()}) == 1, "the two sides made different tokens"
    print_table(
        f"End to end, {size / 1e6:.1f} MB of chats, {peer['tokens'] / 1e6:.2f} M tokens",
        ["", "seconds", "Mtok/s", "x the peer", "peak MB"],
        [
            [
                name,
                f"{case['seconds']:.2f}",
                f"{case['tokens'] / case['seconds'] / 1e6:.2f}",
                f"{peer['seconds'] / case['seconds']:.1f}",
                f"{case['megabytes']:.0f}",
            ]
            for name, case in cases.items()
        ],
    )


def _encode_stage(tokenizer: str, jsonl: str) -> None:
    rows = []
    for name, fast in (("Hugging Face tokenizers", False), ("gigatoken", True)):
        bare = in_own_process(bare_case, tokenizer, jsonl, fast)["seconds"]
        stage = in_own_process(encode_case, tokenizer, jsonl, fast)["seconds"]
        rows.append([name, f"{bare:.2f}", f"{stage:.2f}", f"{stage / bare:.2f}"])
    print_table(
        "The encode stage (parse, render, tokenize, mask) beside the bare tokenizer calls, one process",
        ["", "bare s", "stage s", "stage / bare"],
        rows,
    )


def _encode_parts(tokenizer: str, data: Path) -> None:
    columns = ("cold", "stage", "parse", "adapt, hash", "mark", "tokenize", "store, rest")
    rows = []
    for name in PARTS_OF:
        found = in_own_process(parts_case, tokenizer, str(data / name))
        shares = [f"{100 * found[column] / found['stage']:.0f} %" for column in columns[2:]]
        rows.append([name.partition(".")[0], f"{found['cold']:.2f}", f"{found['stage']:.2f}", *shares])
    print_table("The encode stage by part, seconds of one core; cold: the first time", ["", *columns], rows)


def _growth(tokenizer: str, jsonl: str, tenfold: str, home: Path) -> None:
    rows = []
    for name, path in (("1x", jsonl), ("10x", tenfold)):
        runs: dict[int, list[dict[str, float]]] = {1: [], 2: []}
        for num_workers in (1, 2) * 3:  # in turn, and the best of each, because the machine is shared
            case = in_own_process(ours_case, tokenizer, path, str(home / str(num_workers)), num_workers, True)
            runs[num_workers].append(case)
        one, two = (min(cases, key=lambda case: case["seconds"]) for cases in runs.values())
        ratio = one["seconds"] / two["seconds"]
        seconds = [f"{one['seconds']:.2f}", f"{two['seconds']:.2f}", f"{ratio:.2f}"]
        rows.append([name, *seconds, f"{one['own megabytes']:.0f}", f"{one['megabytes']:.0f}"])
    print_table(
        "One and two processes, best of three; and the peak memory of one, without and with the pages of files it maps",
        ["input", "1 process s", "2 s", "gain", "own MB", "with files MB"],
        rows,
    )


if __name__ == "__main__":
    main()
