"""The fast path: a byte-level BPE tokenizer.json through tiktoken, with the same ids or not at all.

    tokenizer.json ─ structural_refusal ─ merge_refusal ─▶ TiktokenPath ─ difference ─▶ used
                           │                   │                              │
                           └───────────────────┴────── the reason ────────────┴──▶ `tokenizers` does all the work

Some texts go to `tokenizers` either way: those that its normalizer would change, and those with a run of characters so
long that tiktoken's regular expressions fail.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.encode.tokenizers._byte_level import (
    is_left_alone,
    merge_refusal,
    split_pattern,
    structural_refusal,
    token_bytes,
)
from megatron_packed_sft.encode.tokenizers.control_tokens import ControlTokens
from megatron_packed_sft.encode.tokenizers.interface import MarkedText

if TYPE_CHECKING:
    import tokenizers

# tiktoken 0.14 overflows its stack on a million spaces and copes with 100,000; older versions are quadratic in words.
MAX_RUN = 10_000
_LONG_RUN = re.compile(rf"\s{{{MAX_RUN}}}|\S{{{MAX_RUN}}}")
# System prompts and tool lists recur: cache up to this many characters.
_CACHE_CHARACTERS = 4_000_000
_ID_BYTES = 4
# Characters that Unicode 13 to 17 added, one line each: they reveal Unicode tables of different versions.
_RECENT = (
    "\u08be\U00010e80\U00011950\U00030000"
    "\u0870\U0001df00\U00016ac0\U00010570"
    "\U00011f50\U0001e4f0\U0001e4ec\U00031350\U0002ebf0\u2ffc"
    "\U00010d40\U000105c0\u1c89\ua7cb\U00011bf0\u0897\U00016d40\U0001ccf0\U0001cc00"
    "\U000323b0\U00010940\U00011de0\ua7ce\u1acf\u20c1\U00016ea0"
)
# Texts on which almost equal tokenizers tend to differ.
_TEXTS = (
    "",
    " ",
    "Hello, world! It's John's; they'll say WE'VE won, I'M sure 'tis. DON'T 'S '\u017f '\u212a",
    "  leading, trailing  \n\n\n \r\n\t\t mixed \t\n ",
    "a  b   c    d     e\n \n  \n\n   x",
    " \u00a0\u2003\u3000\u200b\u2028\u2029\u0085\x0b\x0c\x1c\x1f\ufeff|\x00\x01\x7f",
    "0 12 345 6789 1234567890 3.14159e-10 0xDEADBEEF 1,000,000 ٣٤٥ ⅷ ½ ² ๑๒๓ \U0001d7d9\U0001d7da",
    "naïve café Ångström CamelCaseWord HTTPServer snake_case ßẞ \u0149 \u01c6 \u01c5 \u02bcn \u0130\u0131",
    "cafe\u0301 e\u0323\u0307 \u1100\u1161\u11a8 \u212b \u0958",
    "日本語のテスト。中文字符,한국어 हिन्दी ไทย العربية עברית Ελληνικά Кириллица",
    "👩‍👩‍👧‍👦 🇩🇪🇫🇷 👍🏽 ❤️ ☃ \U0001f9ff \U0010fffd \ue000",
    '{"a": [1, 2, {\'b\': null}], "c\\n": "\\u00e9"} <tag attr=\'x\'>&amp;</tag> ```py\nif x:\n\treturn -1\n```',
    "https://example.org/a_b?c=d&e=%20#f user@example.org C:\\path //// ==== !!!??? ...--- \n/\n#/\n",
    "".join(f"a{character}1 {character}{character}! " for character in _RECENT),
    "x" * 500 + " " * 500 + "\n" * 300 + "ab" * 300 + "9" * 100 + "é" * 200,
)


class TiktokenPath:
    """Encode texts through tiktoken.

    Args:
        document: a parsed tokenizer.json that passed the checks of `open_tiktoken_path`.
        controls: its added tokens.
        ranks: the bytes of its other tokens -> their ids.
    """

    def __init__(self, document: dict[str, Any], controls: ControlTokens, ranks: dict[bytes, int]) -> None:
        import tiktoken

        # The text is split at control tokens before tiktoken sees it, so tiktoken itself never produces one.
        self._encoding = tiktoken.Encoding(
            "megatron_packed_sft",
            pat_str=split_pattern(document) or "",
            mergeable_ranks=ranks,
            special_tokens=controls.ids,
        )
        self._document = document
        self._controls = controls
        self._control_ids = {text: np.uint32(number).tobytes() for text, number in controls.ids.items()}
        self._cache: dict[str, bytes] = {}  # ids as bytes, which are faster to join than arrays
        self._cached_characters = 0

    def accepts(self, text: str) -> bool:
        """Return whether a text may go through tiktoken."""
        if len(text) > MAX_RUN and _LONG_RUN.search(text):
            return False
        return is_left_alone(self._document, text)

    def encode(self, texts: Sequence[MarkedText]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Return the flat ids of accepted texts, and the number of ids of each."""
        found: list[bytes] = []
        lengths = []
        for text, _, literal, _ in texts:
            before = len(found)
            for index, part in enumerate(self._controls.split(text, literal).parts):
                if index % 2:
                    found.append(self._control_ids[part])
                elif part:
                    found.append(self._cache.get(part) or self._encode_part(part))
            lengths.append(sum(map(len, found[before:])) // _ID_BYTES)
        ids = np.frombuffer(bytearray().join(found), np.int32)  # a bytearray keeps the array writable
        return ids, np.array(lengths, np.int64)

    def difference(self, backend: tokenizers.Tokenizer) -> str | None:
        """Return a text on which tiktoken and `tokenizers` differ, or None."""
        for text in check_texts(self._controls.ids):
            if self.accepts(text):
                ids, _ = self.encode([MarkedText(text)])
                if ids.tolist() != backend.encode(text, add_special_tokens=False).ids:
                    return text
        lookalikes = " ".join(self._controls.ids)
        ids, _ = self.encode([MarkedText(lookalikes, literal=[(0, len(lookalikes))])])
        return lookalikes if set(self._controls.ids.values()) & set(ids.tolist()) else None

    def _encode_part(self, part: str) -> bytes:
        ids = self._encoding.encode_to_numpy(part, disallowed_special=()).tobytes()
        if self._cached_characters > _CACHE_CHARACTERS:
            self._cache = {}
            self._cached_characters = 0
        self._cache[part] = ids
        self._cached_characters += len(part)
        return ids


def open_tiktoken_path(
    document: dict[str, Any],
    controls: ControlTokens,
    backend: Callable[[], tokenizers.Tokenizer],
    *,
    passed_with: str | None = None,
) -> TiktokenPath | str:
    """Return the fast path of a tokenizer, or the reason why it has none.

    Args:
        document: the parsed tokenizer.json.
        controls: its added tokens.
        backend: returns the same tokenizer in `tokenizers`, the reference.
        passed_with: the `checked_by` of a process in which this file passed all checks; with the same versions they are
            skipped.
    """
    try:
        import tiktoken  # noqa: F401
    except ImportError:
        return "tiktoken is not installed"
    if reason := structural_refusal(document):
        return reason
    if any(token["content"] not in controls.ids for token in document.get("added_tokens", [])):
        return "some of its added tokens are ordinary text"
    single = [bytes([value]) for value in range(256)]
    ranks = token_bytes(document, set(controls.ids))
    if ranks is None or not all(byte in ranks for byte in single):
        return "its vocabulary is not spelled in bytes"
    has_passed = passed_with == checked_by()
    if not has_passed and (reason := merge_refusal(document, backend(), set(controls.ids))):
        return reason
    try:
        path = TiktokenPath(document, controls, ranks)
    except ValueError as error:
        return f"tiktoken does not take its pattern: {error}"
    if not has_passed and (text := path.difference(backend())) is not None:
        return f"tiktoken gives other ids for {text[:40]!r}"
    return path


def checked_by() -> str:
    """Return the versions of tiktoken and tokenizers; equal versions need no second check."""
    return ", ".join(f"{name} {version(name)}" for name in ("tiktoken", "tokenizers"))


def check_texts(control_tokens: Iterable[str]) -> list[str]:
    r"""Return the fixed texts, and texts of all control tokens: adjacent, inside words, between spaces, and broken.

    Example:
        >>> check_texts(["<s>"])[-1]
        '<s>\n<s> <s>'
    """
    tokens = list(control_tokens)
    joints = ("", "a", " ", "\n", " x ")
    return [
        *_TEXTS,
        *(joint + joint.join(tokens) + joint for joint in joints),
        "".join(token[:-1] + " " + token[1:] for token in tokens),
        *(f"{token}\n{token} {token}" for token in tokens[:32]),
    ]
