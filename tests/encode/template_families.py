# ruff: noqa: RUF001 (DeepSeek writes full-width bars)
"""What assistants write in the chat formats of real models, written by hand: each family's answers and tool calls.

The expected text of a turn is put together here from what is known of a format, never by the code under test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Call = tuple[str, dict[str, Any]]
ID = "abcdefghi"


class Family(NamedTuple):
    """How the model of a family writes.

    Args:
        templates: files of llama.cpp's collection.
        answer: an answer, `{}` standing for its text.
        last_answer: the same where it ends the chat, if it is different there.
        calls: tool calls; None if the template knows none, so that they are lost.
        last_calls: the same where they end the chat.
        stops: stop tokens of the models' generation_config.json.
        reasoned: reasoning and answer, where they end the chat; None if the template leaves reasoning out.
        empty: a turn without text in the middle of a chat, if it is not an answer with no text.
        only_first_call: the template leaves parallel calls out.
        special: shapes for which none of this holds -> what is written, all turns together.
    """

    templates: tuple[str, ...]
    answer: str
    calls: Callable[[Sequence[Call]], str] | None = None
    last_answer: str | None = None
    last_calls: Callable[[Sequence[Call]], str] | None = None
    stops: tuple[str, ...] = ()
    reasoned: str | None = None
    empty: str | None = None
    only_first_call: bool = False
    special: Mapping[str, str] = {}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes_calls(end: str) -> Callable[[Sequence[Call]], str]:
    def calls(found: Sequence[Call]) -> str:
        one = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
        return "\n".join(one.format(name, _json(arguments)) for name, arguments in found) + end

    return calls


def _mistral_nemo(found: Sequence[Call]) -> str:
    return "[TOOL_CALLS]" + _json([{"name": name, "arguments": given, "id": ID} for name, given in found]) + "</s>"


def _devstral(found: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(given)}" for name, given in found) + "</s>"


def _mistral_small(found: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]{ID}[ARGS]{_json(given)}" for name, given in found) + "</s>"


def _deepseek_v31(found: Sequence[Call]) -> str:
    calls = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(given)}<｜tool▁call▁end｜>" for name, given in found
    )
    return f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"


def _deepseek_v32(found: Sequence[Call]) -> str:
    calls = ""
    for name, given in found:
        calls += f'<｜DSML｜invoke name="{name}">\n'
        for key, value in given.items():
            is_text = isinstance(value, str)
            shown = value if is_text else _json(value)
            calls += f'<｜DSML｜parameter name="{key}" string="{str(is_text).lower()}">{shown}</｜DSML｜parameter>\n'
        calls += "</｜DSML｜invoke>\n"
    return f"\n\n<｜DSML｜function_calls>\n{calls}</｜DSML｜function_calls><｜end▁of▁sentence｜>"


def _cohere_in_turn(start: str, end: str) -> dict[str, str]:
    """Calls are numbered through the chat."""
    first = _cohere([("look", {"city": "Oslo"})])
    second = _cohere([("look", {"city": "Rome"})]).replace('"0"', '"1"')
    answers = [f"{start}{text}{end}<|END_OF_TURN_TOKEN|>" for text in ("Both.", "Ok.")]
    return {"calls in turn": "".join((first, second, *answers))}


def _cohere(found: Sequence[Call]) -> str:
    calls = ",\n".join(
        f'    {{"tool_call_id": "{number}", "tool_name": "{name}", "parameters": {_json(given)}}}'
        for number, (name, given) in enumerate(found)
    )
    return f"<|START_ACTION|>[\n{calls}\n]<|END_ACTION|><|END_OF_TURN_TOKEN|>"


def _apriel(end: str) -> Callable[[Sequence[Call]], str]:
    def calls(found: Sequence[Call]) -> str:
        listed = _json([{"name": name, "arguments": given, "id": ID} for name, given in found])
        return f"\n<tool_calls>{listed}</tool_calls>{end}"

    return calls


def _apriel_last(found: Sequence[Call]) -> str:
    return f"\n<tool_calls>{_json([{'name': name, 'arguments': given} for name, given in found])}</tool_calls>"


def _seed(found: Sequence[Call]) -> str:
    calls = []
    for name, given in found:
        lines = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in given.items())
        calls.append(f"<seed:tool_call>\n<function={name}>\n{lines}</function>\n</seed:tool_call>")
    return "\n".join(calls) + "<seed:eos>"


def _apertus(found: Sequence[Call]) -> str:
    return f"<|tools_prefix|>{_json([{name: given} for name, given in found])}<|tools_suffix|>"


def _gemma4(found: Sequence[Call]) -> str:
    def shown(value: Any) -> str:
        return f'<|"|>{value}<|"|>' if isinstance(value, str) else _json(value)

    return "".join(
        f"<|tool_call>call:{name}{{{','.join(f'{key}:{shown(value)}' for key, value in given.items())}}}<tool_call|>"
        for name, given in found
    )


def _kimi_k3(found: Sequence[Call]) -> str:
    calls = ""
    for number, (name, given) in enumerate(found, start=1):
        calls += f'<|open|>call tool="{name}" index="{number}"<|sep|>'
        for key, value in given.items():
            kind = "string" if isinstance(value, str) else "number"
            calls += f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
        calls += "<|close|>call<|sep|>"
    return (
        "<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|>"
        f"<|open|>tools<|sep|>{calls}<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )


def _solar(found: Sequence[Call]) -> str:
    calls = "".join(
        f"<|tool_call:begin|>{ID}<|tool_call:name|>{name}<|tool_call:args|>{_json(given)}<|tool_call:end|>"
        for name, given in found
    )
    return f"<|tool_calls|>{calls}<|calls|>"


def _coder(before: str, between: str, end: str) -> Callable[[Sequence[Call]], str]:
    """Calls as XML, as Qwen3-Coder and Nemotron write them."""

    def calls(found: Sequence[Call]) -> str:
        written = []
        for name, given in found:
            lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
            written.append(f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>")
        return before + between.join(written) + end

    return calls


def _gigachat(found: Sequence[Call]) -> str:
    [(name, given)] = found[:1]
    call = _json({"name": name, "arguments": given})
    return f"<|message_sep|>\n\nfunction call<|role_sep|>\n{call}<|message_sep|>"


def _hunyuan(found: Sequence[Call]) -> str:
    def tag(name: str) -> str:
        return f"<{name}:opensource>"

    calls = ""
    for name, given in found:
        pairs = "".join(
            f"{tag('arg_key')}{key}{tag('/arg_key')}\n{tag('arg_value')}{value}{tag('/arg_value')}\n"
            for key, value in given.items()
        )
        calls += f"{tag('tool_call')}{name}{tag('tool_sep')}\n{pairs}{tag('/tool_call')}\n"
    return f"{tag('tool_calls')}\n{calls}{tag('/tool_calls')}<｜hy_eos:opensource｜>"


def _glm(found: Sequence[Call]) -> str:
    calls = ""
    for name, given in found:
        pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in given.items())
        calls += f"\n<tool_call>{name}\n{pairs}</tool_call>"
    return f"\n<think></think>{calls}<|observation|>"


def _gpt_oss(found: Sequence[Call]) -> str:
    [(name, given)] = found[:1]
    return f" to=functions.{name}<|channel|>commentary json<|message|>{_json(given)}<|call|>"


def _llama31(found: Sequence[Call]) -> str:
    [(name, given)] = found[:1]
    return f'{{"name": "{name}", "parameters": {_json(given)}}}<|eot_id|>'


def _minimax(found: Sequence[Call]) -> str:
    calls = ""
    for name, given in found:
        pairs = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in given.items())
        calls += f'<invoke name="{name}">\n{pairs}</invoke>\n'
    return f"\n<minimax:tool_call>\n{calls}</minimax:tool_call>[e~["


def _without(end: str, calls: Callable[[Sequence[Call]], str]) -> Callable[[Sequence[Call]], str]:
    return lambda found: calls(found).removesuffix(end)


FAMILIES = {
    "Qwen2.5": Family(
        ("Qwen-Qwen2.5-7B-Instruct",),
        "{}<|im_end|>", _hermes_calls("<|im_end|>"), stops=("<|im_end|>", "<|endoftext|>"),
    ),
    "Qwen3": Family(
        ("Qwen-Qwen3-0.6B",),
        "{}<|im_end|>", _hermes_calls("<|im_end|>"),
        last_answer="<think>\n\n</think>\n\n{}<|im_end|>",
        last_calls=lambda found: "<think>\n\n</think>\n\n" + _hermes_calls("<|im_end|>")(found),
        stops=("<|im_end|>", "<|endoftext|>"), reasoned="<think>\n{}\n</think>\n\n{}<|im_end|>",
    ),
    "Qwen3-Coder": Family(("Qwen3-Coder",), "{}<|im_end|>", _coder("", "\n", "<|im_end|>"), stops=("<|im_end|>",)),
    "Hermes": Family(
        ("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"),
        "{}<|im_end|>", _hermes_calls("<|im_end|>"), stops=("<|im_end|>",),
    ),
    "granite 4": Family(
        ("ibm-granite-granite-4.0", "ibm-granite-granite-4.1"),
        "{}<|end_of_text|>", _hermes_calls("<|end_of_text|>"), stops=("<|end_of_text|>",),
    ),
    "granite 3.3": Family(("ibm-granite-granite-3.3-2B-Instruct",), "{}<|end_of_text|>", stops=("<|end_of_text|>",)),
    "SmolLM3": Family(("HuggingFaceTB-SmolLM3-3B",), "{}<|im_end|>", stops=("<|im_end|>",)),
    "Mistral Nemo": Family(("mistralai-Mistral-Nemo-Instruct-2407",), "{}</s>", _mistral_nemo, stops=("</s>",)),
    "Devstral": Family(("unsloth-mistral-Devstral-Small-2507",), "{}</s>", _devstral, stops=("</s>",)),
    "Mistral Small 3.2": Family(("Mistral-Small-3.2-24B-Instruct-2506",), "{}</s>", _mistral_small, stops=("</s>",)),
    "DeepSeek V3.1": Family(
        ("deepseek-ai-DeepSeek-V3.1",), "{}<｜end▁of▁sentence｜>", _deepseek_v31, stops=("<｜end▁of▁sentence｜>",)
    ),
    "DeepSeek V3.2": Family(
        ("deepseek-ai-DeepSeek-V3.2",), "{}<｜end▁of▁sentence｜>", _deepseek_v32, stops=("<｜end▁of▁sentence｜>",)
    ),
    "Command-R7B": Family(
        ("CohereForAI-c4ai-command-r7b-12-2024-tool_use",),
        "<|START_RESPONSE|>{}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", _cohere, stops=("<|END_OF_TURN_TOKEN|>",),
        special=_cohere_in_turn("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "Cohere2MoE": Family(
        ("Cohere2MoE",),
        "<|START_TEXT|>{}<|END_TEXT|><|END_OF_TURN_TOKEN|>", _cohere, stops=("<|END_OF_TURN_TOKEN|>",),
        reasoned="{}<|END_THINKING|><|START_TEXT|>{}<|END_TEXT|><|END_OF_TURN_TOKEN|>",
        special=_cohere_in_turn("<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    "Apriel 1.5": Family(
        ("unsloth-Apriel-1.5",), "{}\n<|end|>", _apriel("\n<|end|>"), stops=("<|end|>",),
        last_calls=lambda found: _apriel_last(found) + "\n<|end|>",
    ),
    "Apriel 1.6": Family(
        ("Apriel-1.6-15b-Thinker-fixed",), "{}\n<|end|>", _apriel("\n<|end|>"),
        last_answer="{}", last_calls=_apriel_last, stops=("<|end|>",),
        reasoned="{}\n[BEGIN FINAL RESPONSE]\n{}",
    ),
    "Seed-OSS": Family(("ByteDance-Seed-OSS",), "{}<seed:eos>", _seed, stops=("<seed:eos>",), empty="",
        reasoned="<seed:think>{}</seed:think>\n{}<seed:eos>",
    ),
    "Apertus": Family(
        ("Apertus-8B-Instruct",), "{}<|assistant_end|>", _apertus, last_answer="{}", stops=("<|assistant_end|>",),
        special={"two in a row": "One.Two."},  # one turn for this template
    ),
    "Gemma 4": Family(
        ("google-gemma-4-31B-it-interleaved",),
        "{}<turn|>", lambda found: _gemma4(found) + "<turn|>", stops=("<turn|>", "<eos>"),
    ),
    "Kimi K3": Family(
        ("Kimi-K3",),
        "<|close|>think<|sep|><|open|>response<|sep|>{}<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>",
        _kimi_k3, stops=("<|end_of_msg|>",),
        reasoned="{}<|close|>think<|sep|><|open|>response<|sep|>{}<|close|>response<|sep|><|close|>message<|sep|>"
        "<|end_of_msg|>",
    ),
    "Solar": Family(
        ("upstage-Solar-Open-100B",), "<|content|>{}<|end|>", _solar, stops=("<|end|>", "<|calls|>", "<|flush|>"),
        reasoned="<|think|>{}<|end|><|begin|>assistant<|content|>{}<|end|>",
    ),
    "Nemotron 3 Nano": Family(
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",),
        "</think>{}<|im_end|>", _coder("</think>\n", "\n", "\n<|im_end|>"), stops=("<|im_end|>",),
        reasoned="{}\n</think>\n{}<|im_end|>",
    ),
    "GigaChat 3": Family(
        ("GigaChat3-10B-A1.8B",), "{}<|message_sep|>", _gigachat, stops=("</s>",), only_first_call=True
    ),
    "Hunyuan": Family(
        ("tencent-Hy3",), "{}<｜hy_eos:opensource｜>", _hunyuan, last_answer="{}",
        stops=("<｜hy_eos:opensource｜>",),
        reasoned="<think:opensource>{}</think:opensource>{}",
        # After an answer this template writes no prompt, so the block before the second one is not given.
        special={"two in a row": "One.<｜hy_eos:opensource｜><think:opensource></think:opensource>Two."},
    ),
    "Phi-3.5": Family(("microsoft-Phi-3.5-mini-instruct",), "{}<|end|>", stops=("<|end|>", "<|endoftext|>")),
    "GLM-4.6": Family(
        ("GLM-4.6",), "\n<think></think>\n{}<|user|>", _glm,
        last_answer="\n<think></think>\n{}", last_calls=_without("<|observation|>", _glm),
        stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
        reasoned="\n<think>{}</think>\n{}", empty="\n<think></think><|user|>",
        special={"two in a row": "\n<think></think>\nOne.\n<think></think>\nTwo."},
    ),
    "gpt-oss": Family(
        ("openai-gpt-oss-120b",), "<|channel|>final<|message|>{}<|end|>", _gpt_oss,
        last_answer="<|channel|>final<|message|>{}<|return|>", stops=("<|return|>", "<|call|>"), only_first_call=True,
        reasoned="<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}<|return|>",
    ),
    "Llama 3.1": Family(
        ("meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct", "meta-llama-Llama-3.3-70B-Instruct"),
        "{}<|eot_id|>", _llama31, stops=("<|eot_id|>", "<|eom_id|>"),
    ),
    "Gemma 2": Family(("google-gemma-2-2b-it",), "{}<end_of_turn>", stops=("<end_of_turn>", "<eos>")),
    "Kimi K2": Family(("Kimi-K2-Instruct",), "{}<|im_end|>", stops=("<|im_end|>",)),
    "MiniMax M2": Family(
        ("MiniMax-M2",), "{}[e~[", _minimax, stops=("[e~[",), reasoned="{}\n</think>\n\n{}[e~["
    ),
}  # fmt: skip
