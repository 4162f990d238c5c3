"""Tokenizers that the tests make themselves, and texts to try them on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megatron_packed_sft.encode.tokenizers.gigatoken_path import check_texts

# The shape of pattern that Qwen and Llama 3 use: contractions, words with one sign in front, digits, signs, space.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NOT_SPECIAL = ("<think>", "</think>")
CONFIG = {
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": {"__type": "AddedToken", "content": "<|endoftext|>", "special": True, "normalized": False},
    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    "chat_template": "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}",
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
}
PIECES = [
    *(
        "the",
        " quick",
        " brown",
        "fox",
        " jumps",
        "over",
        " 12",
        "345",
        " it's",
        "DON'T",
        "  ",
        "\n",
        "\n\n",
        "\t",
        ".",
    ),
    *("né", " café", "日本", "語", "👍🏽", " ß", "\u00a0", "e\u0301", "<|im_", "end|>", "<", "|>", "!?", "\r\n", "ﬁ"),
]


def corpus(num_texts: int = 400, seed: int = 0) -> list[str]:
    """Texts of known pieces in random order."""
    random_state = random.Random(seed)
    return ["".join(random_state.choices(PIECES, k=random_state.randrange(1, 40))) for _ in range(num_texts)]


def nasty_texts(control_tokens: list[str]) -> list[str]:
    """Fixed hard texts, and random ones with control tokens inside."""
    random_state = random.Random(1)
    mixed = [*PIECES, *control_tokens]
    return check_texts(control_tokens) + [
        "".join(random_state.choices(mixed, k=random_state.randrange(60))) for _ in range(300)
    ]


def byte_level_tokenizer(*, vocab_size: int = 500, normalizer: Any = None, added: Any = ()) -> Tokenizer:
    """A byte-level BPE like Qwen's, trained here."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in NOT_SPECIAL])
    tokenizer.add_tokens(list(added))
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """A BPE over characters with bytes as a last resort, like Llama 2 and Gemma; spaces become marks."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], limit_alphabet=40, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens(["<turn>"])
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("</td>", normalized=False)])
    document = json.loads(tokenizer.to_str())
    spelled = set(byte_tokens)
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] not in spelled]
    return Tokenizer.from_str(json.dumps(document))


def save_folder(tokenizer: Tokenizer, folder: Path, config: dict[str, Any] | None = None) -> Path:
    """Save as Hugging Face does."""
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG if config is None else config))
    return folder
