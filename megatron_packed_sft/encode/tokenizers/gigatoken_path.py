"""The fast path: gigatoken, used only if it gives the same ids as `tokenizers`, and tokens whose lengths are known.

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
import re
import secrets
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from megatron_packed_sft.encode.tokenizers.interface import SPACE_MARK
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


# How many bytes of text each id stands for, where a tokenizer.json tells.
#
# Tokens that spell the unchanged text follow each other without gaps, so their lengths give their positions, and the
# tokenizer need not compute offsets. This holds for two families: byte-level BPE (Qwen, Llama 3, GPT-2), whose tokens
# are bytes in disguise, and BPE that writes a space as a mark and rare characters as bytes (Gemma, Llama 2).

# Model settings with which a token may stand for bytes other than its spelling.
_NOT_BYTES = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
_SPACES_TO_MARKS = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


class TokenLengths(NamedTuple):
    """The lengths of a tokenizer's tokens.

    Args:
        num_bytes: of each id.
        composes: whether the normalizer composes characters (NFC), which changes some texts.
        marks_spaces: whether spaces become marks, so that a mark in the text looks like a space.
        takes_prefix: whether the tokenizer may put a space in front of a text, as part of its first token.
    """

    num_bytes: npt.NDArray[np.int64]
    composes: bool = False
    marks_spaces: bool = False
    takes_prefix: bool = False

    def hold_for(self, text: str) -> bool:
        r"""Return whether the tokens of a text spell it as it is.

        Example:
            >>> lengths = TokenLengths(np.ones(3, np.int64), composes=True)
            >>> lengths.hold_for("e\u0301"), lengths.hold_for("\u00e9")
            (False, True)
        """
        if text.isascii():
            return True
        if self.marks_spaces and SPACE_MARK in text:
            return False
        return not self.composes or unicodedata.is_normalized("NFC", text)


def byte_alphabet() -> dict[int, int]:
    """Return the byte that each printable character of a byte-level vocabulary stands for: code point -> byte.

    Example:
        >>> alphabet = byte_alphabet(); alphabet[ord("a")] == ord("a"), alphabet[ord("Ġ")] == ord(" ")
        (True, True)
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + index: byte for index, byte in enumerate(hidden)}


def token_lengths(document: dict[str, Any]) -> TokenLengths | None:
    """Return the lengths of all tokens, or None if they depend on more than the id.

    Example:
        >>> level = {"type": "ByteLevel", "add_prefix_space": False}
        >>> model = {"type": "BPE", "vocab": {"a": 0, "Ġa": 1}}
        >>> token_lengths(
        ...     {"model": model, "pre_tokenizer": level, "added_tokens": [{"id": 2, "content": "<s>"}]}
        ... ).num_bytes
        array([1, 2, 3])
    """
    model = document["model"]
    if model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        return None
    added = {token["content"]: token["id"] for token in document["added_tokens"]}
    vocabulary = {token: number for token, number in model["vocab"].items() if token not in added}
    if _is_byte_level(document):
        # A token not spelled in bytes (Command R has emoji) never occurs; if it did, the lengths would not add up.
        sizes = list(map(len, vocabulary))
        disguises = "".join(map(chr, byte_alphabet()))
        if not set("".join(vocabulary)) <= set(disguises):
            sizes = [0 if token.strip(disguises) else len(token) for token in vocabulary]
        return TokenLengths(_table(vocabulary, sizes, added), composes=_composes(document))
    prefix = _prefix_of_marked_spaces(document)
    if prefix is None or not all(
        f"<0x{value:02X}>" in vocabulary or (value < 0x80 and chr(value) in vocabulary) for value in range(256)
    ):
        return None  # some characters have no token
    sizes = [
        1 if token[0] == "<" and _BYTE_TOKEN.fullmatch(token) else len(token.replace(SPACE_MARK, " ").encode())
        for token in vocabulary
    ]
    return TokenLengths(_table(vocabulary, sizes, added), marks_spaces=True, takes_prefix=prefix)


def merge_product(merge: str | list[str]) -> str:
    """Return the token that a merge makes; files hold merges as text or as pairs.

    Example:
        >>> merge_product("Ġ a"), merge_product(["Ġ", "a"])
        ('Ġa', 'Ġa')
    """
    return merge.replace(" ", "", 1) if isinstance(merge, str) else "".join(merge)


def _is_byte_level(document: dict[str, Any]) -> bool:
    normalizer = document.get("normalizer")
    if normalizer and not _composes(document) and normalizer.get("normalizers") != []:
        return False
    if any(document["model"].get(name) for name in _NOT_BYTES):
        return False
    pre_tokenizer = document.get("pre_tokenizer") or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return bool(steps) and steps[-1].get("type") == "ByteLevel" and not steps[-1].get("add_prefix_space", True)


def _composes(document: dict[str, Any]) -> bool:
    return bool(document.get("normalizer") == {"type": "NFC"})


def _prefix_of_marked_spaces(document: dict[str, Any]) -> bool | None:
    """Return whether a text gets a space in front; None if spaces are marked in another way, or not at all."""
    normalizer, pre_tokenizer = document.get("normalizer"), document.get("pre_tokenizer")
    if not document["model"].get("byte_fallback"):
        return None
    if normalizer is None and pre_tokenizer is not None and pre_tokenizer.get("type") == "Metaspace":
        if pre_tokenizer.get("replacement") != SPACE_MARK:
            return None
        return {"first": True, "never": False}.get(str(pre_tokenizer.get("prepend_scheme")))
    if normalizer is not None and normalizer.get("type") == "Sequence" and len(normalizer["normalizers"]) == 1:
        normalizer = normalizer["normalizers"][0]
    # After spaces have become marks, a split at spaces finds none.
    is_idle = pre_tokenizer is None or (
        pre_tokenizer.get("type") == "Split" and pre_tokenizer.get("pattern") == {"String": " "}
    )
    return False if normalizer == _SPACES_TO_MARKS and is_idle else None


def _table(vocabulary: dict[str, int], sizes: list[int], added: dict[str, int]) -> npt.NDArray[np.int64]:
    result = np.zeros(1 + max([*vocabulary.values(), *added.values()]), np.int64)
    result[list(vocabulary.values())] = sizes
    result[list(added.values())] = [len(text.encode()) for text in added]
    return result


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
