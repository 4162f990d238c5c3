"""What was learnt of other chats never changes a mask, on all real chats and five real templates.

All of them with `make test-real`, which takes some minutes; a sample else.
"""

from __future__ import annotations

from itertools import islice

import pytest

from megatron_packed_sft.encode.encoder import RecordEncoder
from megatron_packed_sft.encode.options import EncodeOptions
from megatron_packed_sft.encode.tokenizers.load import load_tokenizer
from tests.encode.template_matrix import encoder_for
from tests.encode.test_shapes import outcome
from tests.real_data import DATA, IS_WHOLE, chat_files, real_chats, templates_folder, tokenizer_folder

TEMPLATES = {
    "Llama 3.1": "meta-llama-Llama-3.1-8B-Instruct",
    "Mistral Nemo": "mistralai-Mistral-Nemo-Instruct-2407",
    "Hermes": "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "Command-R7B": "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "DeepSeek V3.1": "deepseek-ai-DeepSeek-V3.1",
}
# Every so many chats: a twentieth is enough to learn from.
STEP = 1 if IS_WHOLE else 20
NUM_CHATS = None if IS_WHOLE else 40  # of a file


def encoder(name: str) -> RecordEncoder:
    if name == "Qwen3":
        return RecordEncoder(load_tokenizer(tokenizer_folder("qwen3")), None, EncodeOptions(on_lost="warn"))
    return encoder_for(templates_folder() / f"{TEMPLATES[name]}.jinja", on_lost="warn")


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no chats in {DATA}")
@pytest.mark.parametrize("name", ["Qwen3", *TEMPLATES])
def test_real_chats_are_marked_as_by_rendering(name: str) -> None:
    marker = encoder(name).marker()
    num_marked = 0
    for path in chat_files():
        for number, chat in enumerate(islice(real_chats(path), 0, None, STEP)):
            if number == NUM_CHATS:
                break
            expected = outcome(marker.mark_by_rendering, chat)
            assert outcome(marker.mark, chat) == expected, (path.name, number)
            num_marked += isinstance(expected, tuple)
    assert num_marked > (3000 if IS_WHOLE else 40)
