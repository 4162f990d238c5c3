"""Texts on which two tokenizers that are not quite the same tend to differ."""

from __future__ import annotations

from collections.abc import Iterable

# Letters, digits, marks and signs that Unicode 13 to 17 added, a line each: tables of different age show here.
_RECENT = (
    "\u08be\U00010e80\U00011950\U00030000"
    "\u0870\U0001df00\U00016ac0\U00010570"
    "\U00011f50\U0001e4f0\U0001e4ec\U00031350\U0002ebf0\u2ffc"
    "\U00010d40\U000105c0\u1c89\ua7cb\U00011bf0\u0897\U00016d40\U0001ccf0\U0001cc00"
    "\U000323b0\U00010940\U00011de0\ua7ce\u1acf\u20c1\U00016ea0"
)
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


def check_texts(control_tokens: Iterable[str]) -> list[str]:
    r"""The fixed texts, and all control tokens: in a row, in words, between spaces and broken.

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
