"""The fast path through gigatoken, used only if it gives the same ids as `tokenizers`.

    tokenizer.json ─ gigatoken loads it ─ token_lengths ─ difference ─▶ used
                           │                   │              │
                           └───────────────────┴──────────────┴── the reason ──▶ `tokenizers` does all the work

Some texts go to `tokenizers` in any case: those that its normalizer would change, those in which ordinary text looks
like a control token, and those with characters so new that the two libraries may classify them differently.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson

from megatron_packed_sft.encode.tokenizers.interface import SPACE_MARK
from megatron_packed_sft.encode.tokenizers.token_positions import TokenLengths, byte_alphabet
from megatron_packed_sft.support.own_directories import private_temporary_directory, user_cache

if TYPE_CHECKING:
    import tokenizers

# gigatoken caches every word: 20 to 100 MB for this many characters of real text, 800 MB for random letters.
_RENEW_AFTER = 100_000_000
# Tokens of the vocabulary that are compared when a tokenizer is loaded.
_NUM_CHECKED_TOKENS = 8000
# Characters that Unicode 13 to 17 added, one line each: they reveal Unicode tables of different versions.
_RECENT = (
    "\u08be\U00010e80\U00011950\U00030000"
    "\u0870\U0001df00\U00016ac0\U00010570"
    "\U00011f50\U0001e4f0\U0001e4ec\U00031350\U0002ebf0\u2ffc"
    "\U00010d40\U000105c0\u1c89\ua7cb\U00011bf0\u0897\U00016d40\U0001ccf0\U0001cc00"
    "\U000323b0\U00010940\U00011de0\ua7ce\u1acf\u20c1\U00016ea0"
)
# Texts on which nearly equal tokenizers tend to differ.
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
    *(f"a{character}1 {character}{character}! A{character}" for character in _RECENT),
    "x" * 500 + " " * 500 + "\n" * 300 + "ab" * 300 + "9" * 100 + "é" * 200,
)


class GigatokenPath:
    """Encode texts through gigatoken.

    Args:
        document: a parsed tokenizer.json.
        lengths: of its tokens.
    """

    def __init__(self, document: dict[str, Any], lengths: TokenLengths) -> None:
        self._document = document
        self._lengths = lengths
        self._settled: set[str] = set()  # characters that both libraries classify alike
        self._renew()

    def accepts(self, text: str) -> bool:
        """Return whether a text may go through gigatoken."""
        if text.isascii():
            return True
        if unknown := set(text) - self._settled:
            if any(unicodedata.category(character) == "Cn" for character in unknown):
                return False
            self._settled |= unknown
        return self._lengths.hold_for(text)

    def encode(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Return the flat ids of accepted texts, and the number of ids of each."""
        found = list(map(self._encode, texts))
        self._num_characters += sum(map(len, texts))
        if self._num_characters > _RENEW_AFTER:
            self._renew()
        ids = np.concatenate(found) if found else np.empty(0, np.uint32)
        return ids.view(np.int32), np.fromiter(map(len, found), np.int64, len(found))

    def difference(self, backend: tokenizers.Tokenizer) -> str | None:
        """Return a text on which gigatoken and `tokenizers` differ, or None."""
        controls = [token["content"] for token in self._document["added_tokens"]]
        vocabulary = vocabulary_texts(self._document, marks_spaces=self._lengths.marks_spaces)
        texts = [text for text in check_texts(controls) + vocabulary if self.accepts(text)]
        expected = backend.encode_batch(texts, add_special_tokens=False)
        for text, encoding in zip(texts, expected, strict=True):
            if self._encode(text).tolist() != encoding.ids:
                return text
        return None

    def _renew(self) -> None:
        import gigatoken

        self._encode = gigatoken.Tokenizer.from_json(orjson.dumps(self._document)).backend.encode
        self._num_characters = 0


def open_gigatoken_path(
    document: dict[str, Any],
    lengths: TokenLengths | None,
    backend: Callable[[], tokenizers.Tokenizer],
    *,
    has_passed: bool,
) -> GigatokenPath | str:
    """Return the fast path of a tokenizer, or the reason why it has none.

    Args:
        document: the parsed tokenizer.json.
        lengths: of its tokens, if they are known.
        backend: returns the same tokenizer in `tokenizers`, the reference.
        has_passed: whether this file passed the self-check before, with the same versions.
    """
    try:
        import gigatoken  # noqa: F401
    except ImportError:
        return "gigatoken is not installed"
    if document["model"].get("dropout"):
        return "its model sets dropout"
    if lengths is None:
        return "its tokens do not spell the text byte by byte"
    try:
        path = GigatokenPath(document, lengths)
    except Exception as error:  # versions of gigatoken raise different errors
        return f"gigatoken does not take it: {(str(error).splitlines() or [type(error).__name__])[0]}"
    if not has_passed and (text := path.difference(backend())) is not None:
        return f"gigatoken gives other ids for {text[:40]!r}"
    return path


def check_texts(control_tokens: Iterable[str]) -> list[str]:
    r"""Return the fixed texts, and texts with all control tokens: adjacent, inside words, between spaces, and broken.

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


def vocabulary_texts(document: dict[str, Any], *, marks_spaces: bool) -> list[str]:
    """Return texts of tokens from the whole vocabulary, joined with and without spaces.

    Example:
        >>> vocabulary_texts({"model": {"vocab": {"Ġa": 0, "b": 1}}}, marks_spaces=False)
        [' ab', ' a b']
    """
    tokens = list(document["model"]["vocab"])
    alphabet = byte_alphabet()
    spelled = []
    for token in tokens[:: max(1, len(tokens) // _NUM_CHECKED_TOKENS)]:
        if marks_spaces:
            spelled.append(token.replace(SPACE_MARK, " "))
        elif all(ord(character) in alphabet for character in token):
            spelled.append(token.translate(alphabet).encode("latin-1").decode(errors="ignore"))
    parts = [spelled[first : first + 100] for first in range(0, len(spelled), 100)]
    return [joint.join(part) for part in parts for joint in ("", " ")]


# Tokenizers that passed the comparison on this machine are remembered, one small file each: the comparison needs the
# tokenizer in `tokenizers`, which takes longer to load than gigatoken takes for many megabytes of chats. The file is
# named by the tokenizer's fingerprint; with other versions of either library, the comparison runs again. What
# transformers says of a folder (see huggingface_folder) is remembered in the same way.

_CHECKS = 1  # increase it when the checks change, so that every tokenizer is checked again


def checked_by() -> str | None:
    """Return what a check depends on besides the tokenizer (versions, machine), or None if a library is missing."""
    try:
        versions = [f"{name} {version(name)}" for name in ("gigatoken", "tokenizers")]
    except PackageNotFoundError:
        return None
    return ", ".join([*versions, f"checks {_CHECKS}", platform.node()])


def recall(fingerprint: str) -> str | None:
    """Return what was remembered of a tokenizer, such as the `checked_by` with which it passed, or None."""
    directory = _directory()
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return None if directory is None else (directory / fingerprint).read_text()
    return None


def remember(fingerprint: str, answer: str) -> None:
    """Remember something of a tokenizer; if nothing can be written, the next process checks again."""
    directory = _directory()
    if directory is None:
        return
    target = directory / fingerprint
    temporary = target.with_name(f".{fingerprint}.{os.getpid()}-{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(answer)
        temporary.replace(target)


def _directory() -> Path | None:
    cache = user_cache() or private_temporary_directory()
    return None if cache is None else Path(cache, "megatron_packed_sft", "checked_tokenizers")
