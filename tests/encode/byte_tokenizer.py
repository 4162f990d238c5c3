"""A tokenizer one can follow by hand: a token per UTF-8 byte, and control tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_packed_sft.encode.sequences import MarkedText, Segment, Sequences

CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]")


class ByteTokenizer:
    """Ids 0..255 are bytes; control tokens follow in the order given."""

    def __init__(
        self,
        control_tokens: Sequence[str] = CHATML,
        *,
        bos: str | None = None,
        eos: str | None = None,
        chat_template: str | None = None,
        tool_template: str | None = None,
        stops: Sequence[str] = (),
    ) -> None:
        self.path = "byte_tokenizer"
        self.name = "bytes"
        self.fingerprint = "bytes"
        self.control_tokens: Mapping[str, int] = {token: 256 + number for number, token in enumerate(control_tokens)}
        self.vocab_size = 256 + len(control_tokens)
        self.bos_id = self.control_tokens[bos] if bos else None
        self.eos_id = self.control_tokens[eos] if eos else None
        self.pad_id = self.eos_id
        self.chat_template = chat_template
        self.tool_template = tool_template
        self.stop_tokens = [token for token in (eos, *stops) if token]
        named = {"bos_token": bos, "eos_token": eos}
        self.template_variables: Mapping[str, Any] = {key: value for key, value in named.items() if value}

    def encode_many(self, texts: Sequence[MarkedText]) -> Sequences:
        """Encode as the interface says."""
        encoded = [self._encode(text) for text in texts]
        has_segments = any(text.segments for text in texts)
        segments = [self._segment(text, at) for text, tokens in zip(texts, encoded, strict=True) for _, at, _ in tokens]
        train = np.array([is_trained for tokens in encoded for _, _, is_trained in tokens], np.uint8)
        return Sequences(
            np.array([token for tokens in encoded for token, _, _ in tokens], np.int32),
            train,
            np.array([len(tokens) for tokens in encoded], np.int64),
            np.arange(len(texts)),
            weights=np.array([one.weight for one in segments], np.float32) * train if has_segments else None,
            kinds=np.array([one.kind for one in segments], np.uint8) * train if has_segments else None,
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        names = {token: text for text, token in self.control_tokens.items()}
        return b"".join(names[i].encode() if i >= 256 else bytes([i]) for i in map(int, ids)).decode()

    def _segment(self, marked: MarkedText, position: int) -> Segment:
        return next((one for one in marked.segments if one.start <= position < one.end), Segment(0, 0))

    def _encode(self, marked: MarkedText) -> list[tuple[int, int, bool]]:
        """Return id, position and whether it is trained of every token."""
        pattern = re.compile("|".join(map(re.escape, sorted(self.control_tokens, key=len, reverse=True))) or "(?!)")
        trained = {position for start, end in marked.trained for position in range(start, end)}
        literal = {position for start, end in marked.literal for position in range(start, end)}
        tokens = []
        position = 0
        while position < len(marked.text):
            match = pattern.match(marked.text, position)
            if match and position not in literal and match.end() - 1 not in literal:
                inside = [at in trained for at in range(position, match.end())]
                assert all(inside) or not any(inside), "a control token is trained in part"
                tokens.append((self.control_tokens[match[0]], position, inside[0]))
                position = match.end()
            else:
                tokens += [(byte, position, position in trained) for byte in marked.text[position].encode()]
                position += 1
        return tokens
