"""Records of all kinds to sequences: ends, cuts, drops, order; the same whatever comes along."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import numpy as np
import pytest

from megatron_packed_sft.encode.encoder import EncodedRecords, RecordEncoder
from megatron_packed_sft.encode.options import EncodeOptions, TemplateOptions
from megatron_packed_sft.encode.templates.load import ChatTemplate
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records.record import Conversation, Record, TextRecord, TokenizedRecord
from tests.encode import chat_templates
from tests.encode.byte_tokenizer import CHATML, MISTRAL, ByteTokenizer

BOS, EOS = 256, 257


def encoder(**options: Any) -> RecordEncoder:
    return RecordEncoder(ByteTokenizer(MISTRAL, bos="<s>", eos="</s>"), "mistral", EncodeOptions(**options))


def sequences(encoded: EncodedRecords) -> list[tuple[int, list[int], list[int]]]:
    ends = np.cumsum(encoded.sequences.lengths)
    return [
        (int(record), encoded.sequences.input_ids[start:end].tolist(), encoded.sequences.train[start:end].tolist())
        for record, start, end in zip(encoded.sequences.record, ends - encoded.sequences.lengths, ends, strict=True)
    ]


def chat(*words: str) -> Conversation:
    return Conversation([{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(words)])


def test_text_records_train_their_trained_pieces_and_end_with_a_trained_end_of_sequence() -> None:
    [(_, ids, train)] = sequences(encoder().encode_records([TextRecord((("ab", False), ("c", True)))]))
    assert ids == [*b"abc", EOS]
    assert train == [0, 0, 1, 1]


def test_the_end_of_a_text_record_that_ends_untrained_is_not_trained() -> None:
    [(_, ids, train)] = sequences(encoder().encode_records([TextRecord((("a", True), ("bc", True), ("d", False)))]))
    assert (ids[-1], train) == (EOS, [1, 1, 1, 0, 0])


def test_bos_and_eos_are_added_once_where_asked() -> None:
    records: list[Record] = [chat("q", "a"), TextRecord((("<s>xy</s>", True),)), TextRecord((("zz", True),))]
    added = sequences(encoder(add_bos=True, add_eos=True).encode_records(records))
    assert [(ids.count(BOS), ids.count(EOS)) for _, ids, _ in added] == [(1, 1)] * 3
    assert [train[0] for _, _, train in added] == [0, 1, 0]
    bare = sequences(encoder(add_eos=False).encode_records(records))
    assert [(ids.count(BOS), ids.count(EOS)) for _, ids, _ in bare] == [(1, 1), (1, 1), (0, 0)]
    assert bare[0] == added[0]


def test_control_tokens_in_text_records_are_control_tokens_unless_escaped() -> None:
    record = TextRecord((("a[INST]b", True),))
    assert len(sequences(encoder(add_eos=False).encode_records([record]))[0][1]) == 3
    escaped = encoder(add_eos=False, special_tokens_in_text="escape").encode_records([record])
    assert bytes(escaped.sequences.input_ids.tolist()) == b"a[INST]b"


def test_asking_for_a_token_the_tokenizer_lacks_is_an_error() -> None:
    with pytest.raises(InvalidInputError, match=r"encode\.add_bos is true, but tokenizer bytes has no bos token"):
        RecordEncoder(ByteTokenizer(), "chatml", EncodeOptions(add_bos=True))


def test_tokenized_records_are_taken_as_they_are_and_checked() -> None:
    records = [
        TokenizedRecord([5, 6, 7], [0, 1, 1]),
        TokenizedRecord([5, 300], [1, 1]),
        TokenizedRecord([-1, 6], [1, 1]),
        TokenizedRecord([5, 6], [1]),
        TokenizedRecord([], []),
    ]
    encoded = encoder(add_bos=True, add_eos=True).encode_records(records)
    assert sequences(encoded) == [(0, [5, 6, 7], [0, 1, 1])]
    assert [(record, reason) for record, reason, _ in encoded.dropped] == [
        *((record, "invalid_ids") for record in (1, 2, 3)),
        (4, "empty"),
    ]
    assert encoded.dropped[0].detail == "id 300 is not in 0..263"


def test_records_of_all_kinds_keep_their_order_and_do_not_depend_on_their_company() -> None:
    records: list[Record] = [
        TextRecord((("one", True),)),
        TokenizedRecord([1, 2, 3], [0, 0, 1]),
        chat("q", "a"),
        Conversation([{"role": "nobody", "content": "x"}, {"role": "assistant", "content": "y"}]),
        TokenizedRecord([4, 5], [0, 1]),
        TextRecord((("six", True),)),
    ]
    together = encoder(max_len=5).encode_records(records)
    alone = [encoder(max_len=5).encode_records([record]) for record in records]
    assert [record for record, _, _ in sequences(together)] == [0, 1, 2, 4, 5]
    assert [one[1:] for one in sequences(together)] == [one[1:] for each in alone for one in sequences(each)]
    assert [(record, reason) for record, reason, _ in together.dropped] == [(3, "template_error")]
    assert together.num_cut_tokens == sum(each.num_cut_tokens for each in alone)
    assert together.sequences.input_ids.dtype == np.int32
    assert together.sequences.train.dtype == np.uint8
    assert together.sequences.lengths.dtype == together.sequences.record.dtype == np.int64


def test_no_records_give_no_sequences() -> None:
    encoded = encoder(max_len=5).encode_records([])
    assert (
        len(encoded.sequences.input_ids),
        len(encoded.sequences.lengths),
        len(encoded.sequences.record),
        encoded.dropped,
    ) == (0, 0, 0, [])


def test_cutting_says_what_it_cut() -> None:
    records = [
        TextRecord((("abcd", False), ("efgh", True))),
        TextRecord((("ab", True),)),
        TextRecord((("x" * 9, False), ("y", True))),
    ]
    right = encoder(max_len=6).encode_records(records)
    assert [ids for _, ids, _ in sequences(right)] == [[*b"abcdef"], [*b"ab", EOS]]
    assert (right.num_cut_sequences, right.num_cut_tokens, right.num_cut_trained_tokens) == (1, 3 + 5, 3 + 2)
    [dropped] = right.dropped
    assert dropped == (2, "answer_cut_away", "cutting its 11 tokens to encode.max_len=6 removes all 2 trained ones")
    left = encoder(max_len=6, truncation="left").encode_records(records)
    assert [ids for _, ids, _ in sequences(left)] == [[*b"defgh", EOS], [*b"ab", EOS], [*b"xxxxy", EOS]]
    assert (left.num_cut_sequences, left.num_cut_tokens, left.num_cut_trained_tokens) == (2, 3 + 5, 0)
    whole = encoder(max_len=6, truncation="drop").encode_records(records)
    assert [(record, reason) for record, reason, _ in whole.dropped] == [(0, "too_long"), (2, "too_long")]
    assert (whole.num_cut_sequences, whole.num_cut_tokens) == (0, 0)


def test_a_sequence_whose_only_trained_token_is_its_first_has_nothing_to_train() -> None:
    encoded = encoder().encode_records([TokenizedRecord([5, 6], [1, 0]), TokenizedRecord([5], [1])])
    assert [reason for _, reason, _ in encoded.dropped] == ["nothing_to_train", "nothing_to_train"]
    cut = encoder(max_len=2, truncation="left").encode_records([TokenizedRecord([5, 6, 7, 8], [0, 0, 1, 0])])
    assert [reason for _, reason, _ in cut.dropped] == ["answer_cut_away"]


def test_records_without_text_are_empty() -> None:
    encoded = encoder(add_bos=True).encode_records([TextRecord(()), TextRecord((("", True),)), Conversation([])])
    assert [reason for _, reason, _ in encoded.dropped] == ["empty", "empty", "nothing_to_train"]


def test_half_a_surrogate_pair_refuses_its_record_only() -> None:
    encoded = encoder().encode_records([TextRecord((("a\ud800b", True),)), chat("\ud800", "a"), chat("q", "a")])
    assert [(record, reason) for record, reason, _ in encoded.dropped] == [(0, "invalid_text"), (1, "invalid_text")]
    assert encoded.sequences.record.tolist() == [2]


def test_an_encoder_is_pickled_by_its_arguments() -> None:
    tokenizer = ByteTokenizer(CHATML)
    one = RecordEncoder(tokenizer, ChatTemplate("chatml", chat_templates.CHATML), EncodeOptions(max_len=30))
    first = one.encode_records([chat("q", "a")])
    other = pickle.loads(pickle.dumps(one))
    assert other.options == one.options
    assert other.encode_records([chat("q", "a")]).sequences.input_ids.tolist() == first.sequences.input_ids.tolist()


def test_text_records_need_no_template_and_chats_say_that_they_do() -> None:
    bare = RecordEncoder(ByteTokenizer(MISTRAL, eos="</s>"))
    assert len(bare.encode_records([TextRecord((("ab", True),))]).sequences.lengths) == 1
    with pytest.raises(
        InvalidInputError,
        match=r"tokenizer bytes has no chat template; set template\.name to a Jinja file, or to one of chatml",
    ):
        bare.encode_records([chat("q", "a")])


def test_the_tokenizers_own_template_is_the_default() -> None:
    own = RecordEncoder(ByteTokenizer(CHATML, chat_template=chat_templates.CHATML)).encode_records([chat("q", "a")])
    named = RecordEncoder(ByteTokenizer(CHATML), "chatml").encode_records([chat("q", "a")])
    assert own.sequences.input_ids.tolist() == named.sequences.input_ids.tolist()
    assert own.sequences.train.tolist() == named.sequences.train.tolist()


def test_a_template_whose_ends_are_ordinary_text_works_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        encoded = RecordEncoder(ByteTokenizer(()), "chatml").encode_records([chat("q", "<|im_end|>")])
    trained = encoded.sequences.input_ids[encoded.sequences.train == 1]
    assert bytes(trained.tolist()) == b"<|im_end|><|im_end|>"
    assert "with tokenizer bytes, a turn ends with the ordinary text '<|im_end|>'" in caplog.text


def test_a_missing_date_is_an_error_and_a_given_one_makes_reruns_equal() -> None:
    source = "{{ strftime_now('%d %b %Y') }}" + chat_templates.CHATML
    with pytest.raises(InvalidInputError, match=r"set template\.date"):
        RecordEncoder(ByteTokenizer(), source).encode_records([chat("q", "a")])
    dated = RecordEncoder(ByteTokenizer(), TemplateOptions(source, date="2026-01-31"))
    assert dated.mark(chat("q", "a")).text.startswith("31 Jan 2026<|im_start|>")
