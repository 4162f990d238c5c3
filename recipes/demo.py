"""`make demo`: the whole workflow once, on chats that it generates itself.

chats ─▶ packed-sft prepare ─▶ packed-sft validate ─▶ torchrun, two ranks ─▶ stopped by SIGTERM ─▶ resumed to the end

Everything goes to demo_output/. Every step is a command that a user would type; the script prints it before it runs it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from megatron_packed_sft import open_dataset
from megatron_packed_sft.train import read_metrics

RECIPE = Path(__file__).with_name("sft.py")


def say(text: str) -> None:
    """Print a heading."""
    print(f"\n### {text}", flush=True)


def run(*arguments: str) -> None:
    """Run a `packed-sft` command."""
    print(f"$ packed-sft {shlex.join(arguments)}", flush=True)
    if subprocess.run([sys.executable, "-m", "megatron_packed_sft", *arguments], check=False).returncode != 0:
        sys.exit("the demo stops here: the command above failed")


def train(arguments: list[str], *, stop_after: int | None = None) -> None:
    """Train on two ranks; with `stop_after`, send both SIGTERM after that many steps, as a cluster would."""
    shown = shlex.join(["torchrun", "--standalone", "--nproc-per-node", "2", "recipes/sft.py", *arguments])
    print(f"$ {shown}", flush=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(RECIPE)]
    metrics = Path(next(one for one in arguments if one.startswith("output=")).removeprefix("output="), "metrics.jsonl")
    with subprocess.Popen([*command, *arguments], env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        while stop_after is not None and process.poll() is None:
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                if metrics.read_bytes().count(b'"event": "step"') >= stop_after:
                    say("SIGTERM: the run saves and stops")
                    for rank in psutil.Process(process.pid).children():
                        rank.send_signal(signal.SIGTERM)
                    stop_after = None
    if process.returncode != 0:
        sys.exit(f"the demo stops here: training ended with code {process.returncode}")


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="demo_output", help="output directory (default: demo_output)")
    parser.add_argument("--rows", type=int, default=2000, help="chats to generate (default: 2000)")
    parser.add_argument("--steps", type=int, default=24, help="training steps (default: 24)")
    arguments = parser.parse_args()
    home = Path(arguments.output)
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    start = time.perf_counter()

    say("Generate chats in five files of different formats and schemas, and train a tokenizer on some of them")
    run("sample-data", f"{home}/chats", "--rows", str(arguments.rows), "--tokenizer", f"{home}/sp.model")

    say("Prepare: chats to packed, checksummed shards")
    run(
        "prepare", f"input={home}/chats/*", f"output={home}/data", f"tokenizer.path={home}/sp.model", "template=chatml",
        "packing.pack_size=2048", "encode.max_len=2048", "split.validation_fraction=0.05",
    )  # fmt: skip

    say("Validate: every byte and every bin")
    run("validate", f"{home}/data")

    say("Train: two ranks train a small GPT with Megatron-Core, are stopped halfway, and resume")
    recipe = [
        "packed_storage=memmap_v1", f"data.path={home}/data", f"data.tokenizer={home}/sp.model", f"output={home}/run",
        f"train.steps={arguments.steps}", "train.global_batch_size=4", "optimizer.learning_rate=0.003",
    ]  # fmt: skip
    train(recipe, stop_after=arguments.steps // 2)
    train(recipe)

    steps = read_metrics(home / "run" / "metrics.jsonl")
    validation = read_metrics(home / "run" / "metrics.jsonl", "validation")
    share = sum(one["data_share"] * one["step_seconds"] for one in steps) / sum(one["step_seconds"] for one in steps)
    figures = open_dataset(home / "data").figures["train"]
    say(f"Done in {time.perf_counter() - start:.0f} s")
    print(f"chats       {home}/chats")
    print(f"tokenizer   {home}/sp.model")
    print(f"shards      {home}/data: {figures['num_bins']:,} bins, {figures['num_tokens']:,} tokens")
    print(f"token store {home}/data.work/tokens, reused by every pack size")
    print(f"run         {home}/run: checkpoints, metrics.jsonl, config.yaml")
    print(f"loss        {steps[0]['loss']:.3f} at step 1, {steps[-1]['loss']:.3f} at step {steps[-1]['step']}")
    print(f"validation  {validation[0]['loss']:.3f} before, {validation[-1]['loss']:.3f} after")
    print(f"data        waiting for batches took {100 * share:.2f} % of the step time")
    if not steps[-1]["loss"] < steps[0]["loss"]:
        sys.exit("the loss did not fall")


if __name__ == "__main__":
    main()
