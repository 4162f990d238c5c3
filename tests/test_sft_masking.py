"""Acceptance test 1 of seed 002: only the targets of the assistant, its EOT included, count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_packed_sft.caches import SFTExampleDataset, write_meta

SYS, USR, ASST, EOT = 100, 101, 102, 103
A, B = 30, 31
SEQUENCE = [SYS, 10, 11, EOT, USR, 20, 21, EOT, ASST, A, B, EOT]


def dataset(folder: Path, examples: list[list[int]], *, T: int, **options: int) -> SFTExampleDataset:  # noqa: N803
    np.array([token for example in examples for token in example], "<u2").tofile(folder / "train_tokens.bin")
    starts = np.cumsum([0, *map(len, examples[:-1])])
    np.save(folder / "train_idx.npy", starts.astype(np.int64))
    return SFTExampleDataset(
        str(folder / "train_tokens.bin"), str(folder / "train_idx.npy"), T=T, device="cpu", eot_id=EOT, **options
    )


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("asst_id", [{"asst_id": ASST}, {}], ids=["named", "found"])
def test_only_the_targets_for_a_b_and_eot_are_not_ignored(tmp_path: Path, asst_id: dict[str, int]) -> None:
    x, y, y_masked = dataset(tmp_path, [SEQUENCE], T=len(SEQUENCE) - 1, **asst_id).get_batch(B=1, generator=generator())
    assert x.tolist() == [SEQUENCE[:-1]]
    assert y.tolist() == [SEQUENCE[1:]]
    assert y_masked.tolist() == [[-100] * 8 + [A, B, EOT]]
    assert x.dtype == y.dtype == y_masked.dtype == torch.int64


def test_a_short_example_is_filled_up_with_eot_that_never_counts(tmp_path: Path) -> None:
    x, y, y_masked = dataset(tmp_path, [SEQUENCE], T=16, asst_id=ASST).get_batch(B=1, generator=generator())
    assert x.tolist() == [SEQUENCE + [EOT] * 4]
    assert y.tolist() == [SEQUENCE[1:] + [EOT] * 5]
    assert y_masked.tolist() == [[-100] * 8 + [A, B, EOT] + [-100] * 5]


def test_a_long_example_keeps_its_first_tokens(tmp_path: Path) -> None:
    x, y, y_masked = dataset(tmp_path, [SEQUENCE], T=9, asst_id=ASST).get_batch(B=1, generator=generator())
    assert x.tolist() == [SEQUENCE[:9]]
    assert y.tolist() == [SEQUENCE[1:10]]
    assert y_masked.tolist() == [[-100] * 8 + [A]]


def test_every_assistant_turn_counts_and_an_answer_without_eot_ends_with_its_example(tmp_path: Path) -> None:
    example = [ASST, A, EOT, USR, 20, EOT, ASST, B]
    _, _, y_masked = dataset(tmp_path, [example], T=9, asst_id=ASST).get_batch(B=1, generator=generator())
    assert y_masked.tolist() == [[A, EOT, -100, -100, -100, -100, B, -100, -100]]


def test_the_mask_agrees_with_the_rule_followed_token_by_token(tmp_path: Path) -> None:
    draws = torch.randint(0, 6, (50, 23), generator=generator(7))
    vocabulary = [SYS, USR, ASST, EOT, A, B]
    examples = [[SYS, *(vocabulary[token] for token in draw)] for draw in draws.tolist()]
    x, y, y_masked = dataset(tmp_path, examples, T=20, asst_id=ASST).get_batch(B=64, generator=generator())
    for tokens, targets, masked in zip(x.tolist(), y.tolist(), y_masked.tolist(), strict=True):
        inside = False
        for token, target, found in zip(tokens, targets, masked, strict=True):
            inside = inside or token == ASST
            assert found == (target if inside else -100)
            inside = inside and target != EOT


def test_the_meta_beside_the_tokens_names_the_sentinels(tmp_path: Path) -> None:
    write_meta(tmp_path / "meta.json", {"special_token_ids": {"asst": USR, "eot": EOT}})
    _, _, y_masked = dataset(tmp_path, [SEQUENCE], T=11).get_batch(B=1, generator=generator())
    assert y_masked.tolist() == [[-100] * 4 + [20, 21, EOT] + [-100] * 4]
    write_meta(tmp_path / "meta.json", {"special_token_ids": {"asst": USR, "eot": 5}})
    with pytest.raises(ValueError, match=r"eot_id is 103, but .*meta\.json says 5; pass eot_id=5"):
        dataset(tmp_path, [SEQUENCE], T=11)
    write_meta(tmp_path / "meta.json", {"special_token_ids": {"asst": USR, "eot": EOT}})
    with pytest.raises(ValueError, match=r"asst_id is 102, but .*meta\.json says 101; leave asst_id out"):
        dataset(tmp_path, [SEQUENCE], T=11, asst_id=ASST)


def test_a_sentinel_that_cannot_be_known_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pass asst_id, or put the meta\.json of the cache beside the tokens"):
        dataset(tmp_path, [SEQUENCE, [7, 8, EOT]], T=11)
