"""The page of a training run as plain values, from the files of its output directory.

metrics.jsonl    a JSON object per line: losses, learning rate, gradient norm, speed, mixture; validation losses
samples/         the model's answers after some steps
config.yaml      the settings
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_packed_sft._version import __version__
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.inspect.info_of_training import METRICS
from megatron_packed_sft.inspect.tokens_of_bin import escape_invisible
from megatron_packed_sft.support.atomic import os_errors

_MOST_POINTS = 800
_MOST_SAMPLE_FILES = 12
_LONGEST_TEXT = 20_000
_NUMBERS = (
    *("loss", "learning_rate", "grad_norm", "tokens_per_second", "trained_tokens_per_second"),
    *("padding_share", "data_share", "step_seconds"),
)
_PROMPT = re.compile(r"^===== prompt \d+ \(bin (\d+)\)\n", flags=re.MULTILINE)
_SAYS = "\n----- the model says\n"
_DATA_SAYS = "\n----- the data says\n"


def is_run(path: Path) -> bool:
    """Return whether a directory is the output of a training run."""
    return (path / METRICS).is_file()


def run_page(path: Path) -> dict[str, Any]:
    """Return what the page of a run shows.

    Args:
        path: the run's output directory.
    """
    records = _records(path / METRICS)
    steps = [record for record in records if record["event"] == "step"]
    validations = [record for record in records if record["event"] == "validation"]
    if not steps and not validations:
        raise InvalidInputError(f"{path / METRICS} has no record yet; wait for the first step, or check the path")
    last = steps[-1] if steps else {}
    config = path / "config.yaml"
    return {
        "kind": "run",
        "title": path.resolve().name,
        "version": __version__,
        "num_records": len(steps),
        "last": last,
        "loss_kind": last.get("loss_kind"),
        "curves": curves(steps),
        "validation": _validation(validations),
        "mixture": _mixture(steps),
        "samples": _samples(path / "samples"),
        "checkpoints": sorted(one.name for one in (path / "checkpoints").glob("step_*") if one.is_dir()),
        "config": escape_invisible(config.read_text(encoding="utf-8")) if config.is_file() else None,
    }


def _records(path: Path) -> list[dict[str, Any]]:
    with os_errors("read", path):
        lines = path.read_bytes().splitlines(keepends=True)
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):  # a killed run may leave half a line
            continue
        try:
            record = json.loads(line)
            if not {"event", "step"} <= record.keys():
                raise ValueError
        except (ValueError, AttributeError):
            raise InvalidInputError(
                f"{path}, line {number} is not a metrics record; remove the line, or move the file away"
            ) from None
        records.append(record)
    return records


def curves(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return each number over the steps, or the means of groups of steps if there are too many for a chart.

    Example:
        >>> curves([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}])["loss"]
        [2.0, 1.0]
    """
    groups = _groups(steps)
    names = [name for name in _NUMBERS if any(name in record for record in steps)]
    return {
        "per_point": max((len(group) for group in groups), default=1),
        "step": [group[-1]["step"] for group in groups],
        **{name: [_mean(record.get(name) for record in group) for group in groups] for name in names},
    }


def _groups(steps: Sequence[dict[str, Any]]) -> list[Sequence[dict[str, Any]]]:
    size = -(-len(steps) // _MOST_POINTS) or 1
    return [steps[start : start + size] for start in range(0, len(steps), size)]


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None: a batch without trained tokens has no loss."""
    known = [value for value in values if value is not None]
    return float(f"{sum(known) / len(known):.6g}") if known else None


def _validation(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the losses of each validation dataset, over all steps with a validation."""
    steps = sorted({record["step"] for record in records})
    names = list(dict.fromkeys(str(record.get("name")) for record in records))
    losses = {(str(record.get("name")), record["step"]): record.get("loss") for record in records}
    return {
        "step": steps,
        "names": names,
        "loss": {name: [losses.get((name, step)) for step in steps] for name in names},
        "num_trained": {str(record.get("name")): record.get("num_trained") for record in records},
    }


def _mixture(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the share of each source of a blend, and its weight, over the steps."""
    groups = [group for group in _groups(steps) if group[-1].get("sources")]
    names = list(dict.fromkeys(name for group in groups for name in group[-1]["sources"]))

    def over_steps(key: str) -> dict[str, list[float | None]]:
        return {name: [group[-1]["sources"].get(name, {}).get(key) for group in groups] for name in names}

    return {
        "step": [group[-1]["step"] for group in groups],
        "names": names,
        **{key: over_steps(key) for key in ("share", "weight", "num_samples", "epochs")},
    }


def _samples(folder: Path) -> list[dict[str, Any]]:
    """Return the answers of the first and the last validation and some between them, the newest first."""
    files = sorted(folder.glob("step_*.txt")) if folder.is_dir() else []
    if len(files) > _MOST_SAMPLE_FILES:
        chosen = {round(one * (len(files) - 1) / (_MOST_SAMPLE_FILES - 1)) for one in range(_MOST_SAMPLE_FILES)}
        files = [file for number, file in enumerate(files) if number in chosen]
    return [parsed_samples(file.read_text(encoding="utf-8", errors="replace")) for file in reversed(files)]


def parsed_samples(text: str) -> dict[str, Any]:
    r"""Return the title of a samples file, and its prompts with both answers.

    Example:
        >>> text = "step 3: x\n\n===== prompt 1 (bin 7)\nHi\n----- the model says\nOh\n----- the data says\nHello\n"
        >>> parsed_samples(text)["prompts"]
        [{'bin': 7, 'prompt': 'Hi', 'said': 'Oh', 'expected': 'Hello'}]
    """
    first, *rest = _PROMPT.split(text)
    prompts = []
    for number, body in zip(rest[::2], rest[1::2], strict=True):
        # From the end, because a prompt may quote such a file.
        prompt, _, answers = body.rpartition(_SAYS)
        said, _, expected = answers.partition(_DATA_SAYS)
        prompts.append(
            {
                "bin": int(number),
                "prompt": _shown(prompt),
                "said": _shown(said),
                "expected": _shown(expected.rstrip("\n")),
            }
        )
    return {"title": first.strip(), "prompts": prompts}


def _shown(text: str) -> str:
    cut = len(text) - _LONGEST_TEXT
    return escape_invisible(text if cut <= 0 else f"{text[:_LONGEST_TEXT]} … ({cut:,} more characters)")
