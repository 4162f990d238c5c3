"""A packer of the user: passed as a function, registered under a name, or allowed by its dotted path."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_packed_sft import PackOptions, PackPlan, pack
from megatron_packed_sft.cli.main import main as packed_sft
from megatron_packed_sft.encode.tokenizers.sentencepiece import train_sentencepiece
from megatron_packed_sft.errors import InvalidInputError

PAIRS = """
def pack_pairs(lengths, capacity):
    bins = []
    for index, length in enumerate(lengths):
        if bins and len(bins[-1]) < SIZE and sum(lengths[i] for i in bins[-1]) + length <= capacity:
            bins[-1].append(index)
        else:
            bins.append([index])
    return bins

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A module of the user's, with another name in each test, because Python imports a name once."""
    name = f"my_packers_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(PAIRS.replace("SIZE", "2"))
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def bins_of(plan: PackPlan) -> list[list[int]]:
    return [plan.bin(number).tolist() for number in range(plan.num_bins)]


def test_a_function_is_its_own_permission(tmp_path: Path) -> None:
    def longest_first(lengths: np.ndarray[Any, Any], capacity: int) -> list[list[int]]:
        bins: list[list[int]] = []
        for index in np.argsort(-lengths, kind="stable"):
            fitting = (one for one in bins if sum(lengths[one]) + lengths[index] <= capacity)
            next(fitting, None) or bins.append([])  # type: ignore[func-returns-value]
            next(one for one in bins if sum(lengths[one]) + lengths[index] <= capacity).append(int(index))
        return bins

    lengths = [3, 1, 2, 2, 4, 1, 1]
    plan = pack(lengths, pack_size=4, strategy=longest_first)
    assert bins_of(plan) == bins_of(pack(lengths, pack_size=4, strategy="first_fit"))
    assert plan.strategy.endswith(".longest_first")
    assert type(plan.strategy) is str
    plan.save(tmp_path / "plan.npz")
    assert PackPlan.load(tmp_path / "plan.npz").strategy == plan.strategy


def test_the_packer_of_the_documentation_needs_ten_lines() -> None:
    page = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()
    [block] = [part for part in page.split("```python\n")[1:] if "def my_custom_packer" in part]
    code = block.split("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    assert len(code.strip().splitlines()) <= 16
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    plan = pack(lengths, pack_size=128, strategy=names["my_custom_packer"])
    assert sorted(plan.indices.tolist()) == list(range(500))
    assert int(plan.bin_tokens.max()) <= 128


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ([[0, 1], [2]], "left out sequence 3; every sequence needs a bin"),
        ([[0, 1], [2, 3], [1]], "packed a sequence of bin 2 more than once"),
        ([[0, 0], [1, 2, 3]], "packed a sequence of bin 0 more than once"),
        ([[0, 1, 2, 3]], "filled bin 0 with 10; it holds 8"),
        ([[0, 4], [1, 2, 3]], "put something into bin 0 that is not an index from 0 to 3"),
        ([[0, -1], [1, 2]], "not an index from 0 to 3"),
        ([["a"]], "not an index from 0 to 3"),
        ([[0, 1], [], [2, 3]], "left bin 1 empty; leave empty bins out"),
        (None, "must return lists of indices, not NoneType"),
        ([7], "must return lists of indices"),
        (np.array([0, 0, 1]), "returned 3 bin numbers for 4 sequences"),
        (np.array([0, 0, 1, -1]), "one bin number >= 0 per sequence"),
        (np.array([0.0, 0.0, 1.0, 1.0]), "one bin number >= 0 per sequence"),
        (np.array([[0, 0], [1, 1]]), "one bin number >= 0 per sequence"),
        (np.array([0, 0, 0, 0]), "filled bin 0 with 10; it holds 8"),
    ],
    ids=str,
)
def test_what_a_packer_returns_is_checked(returned: Any, sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence) as caught:
        pack([1, 2, 3, 4], pack_size=8, strategy=lambda lengths, capacity: returned)
    assert "<lambda>' " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_too_many_sequences_in_a_bin_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="put 4 sequences into a bin; max_seqs_per_bin is 2"):
        pack([1] * 4, pack_size=8, strategy=lambda lengths, capacity: [[0, 1, 2, 3]], max_seqs_per_bin=2)


@pytest.mark.parametrize("separator", [".", ":"])
def test_a_dotted_path_runs_only_on_the_users_word(module: str, separator: str) -> None:
    path = f"{module}{separator}pack_pairs"
    with pytest.raises(InvalidInputError, match="which runs only if you allow it; set allow_code=true if you"):
        pack([1, 1, 1], pack_size=9, strategy=path)
    assert bins_of(pack([1, 1, 1], PackOptions(pack_size=9, allow_code=True), strategy=path)) == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        (
            "no_such_package.packer",
            r"cannot be imported \(ModuleNotFoundError: .*; check the name, install its package",
        ),
        ("MODULE.nothing", r"cannot be imported \(AttributeError: .*has no attribute 'nothing'"),
        ("MODULE.number", "is not a function, but 3"),
    ],
)
def test_a_path_that_leads_nowhere_is_one_sentence(module: str, path: str, sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence) as caught:
        pack([1], PackOptions(pack_size=9, allow_code=True), strategy=path.replace("MODULE", module))
    assert "\n" not in str(caught.value)


def test_prepare_runs_a_dotted_path_on_the_users_word_and_plans_again_when_its_code_changes(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    records = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "two and two?"}, {"role": "assistant", "content": "four"}]
    records.write_text((json.dumps({"messages": turns}) + "\n") * 12)
    train_sentencepiece(["two and two? four"] * 20, tmp_path / "sp.model", vocab_size=280)
    settings = [
        f"input={records}",
        f"output={tmp_path / 'out'}",
        f"tokenizer.path={tmp_path / 'sp.model'}",
        "template=chatml",
        f"packing.strategy={module}.pack_pairs",
        "packing.pack_size=512",
        "split.validation_fraction=0",
        "executor.num_workers=1",
    ]
    assert packed_sft(["prepare", *settings]) == 2
    assert "is code, which runs only if you allow it; set packing.allow_code=true" in capsys.readouterr().err
    allowed = [*settings, "packing.allow_code=true", "overwrite=true"]
    assert packed_sft(["prepare", *allowed]) == 0, capsys.readouterr().err

    def num_bins() -> int:
        found = json.loads((tmp_path / "out" / "dataset.json").read_text())
        return int(found["splits"]["train"]["num_bins"])

    assert num_bins() == 6
    (tmp_path / f"{module}.py").write_text(PAIRS.replace("SIZE", "3"))
    sys.modules.pop(module)
    importlib.invalidate_caches()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert packed_sft(["prepare", *allowed]) == 0, capsys.readouterr().err
    assert num_bins() == 4
