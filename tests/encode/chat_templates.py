"""Small templates that behave as well-known ones do, each with a trait that masks get wrong; made for these tests."""

from __future__ import annotations

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Trims, and puts its text together before it writes it.
TRIMMING = (
    "{% for m in messages %}{% set t = '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>' %}{{ t }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Old reasoning is dropped, the last answer always shows a think block: not prefix-preserving. Tool calls as JSON.
THINKING = """
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set content = m.content or '' %}
        {%- set reasoning = m.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.last %}
            {{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# The generation prompt ends with more than a stored answer shows.
PROMPT_OPENS_THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")

# No generation prompt, the system prompt inside the last question, tools before each message that equals the last one.
BRACKETS = """
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- set questions = rest | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for m in rest %}
    {%- if m.role == 'user' %}
        {%- if tools and m == questions[-1] %}
            {{- '[AVAILABLE_TOOLS]' + tools | tojson }}
        {%- endif %}
        {{- '[INST]' + (system + '\\n\\n' if m == questions[-1] and system else '') + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {%- if m.tool_calls[0].id | length != 9 %}
            {{- raise_exception('ids have nine letters') }}
        {%- endif %}
        {{- '[TOOL_CALLS]' + m.tool_calls | tojson + eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- m.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""

# Channels: one message makes two headers; a call ends with another token; the tool's header repeats its name.
CHANNELS = """
{%- set last = namespace(name='') %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if m.reasoning_content %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}
        {%- endif %}
        {%- if m.tool_calls %}
            {%- set last.name = m.tool_calls[0].function.name %}
            {{- '<|start|>assistant to=functions.' + last.name + '<|message|>' }}
            {{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
            {{- '<|return|>' if loop.last else '<|end|>' }}
        {%- endif %}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions.' + last.name + '<|message|>' + m.content + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""
CHANNEL_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

# Generation marks as TRL puts them: the newline before and the one after are inside.
GENEROUS_MARKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant"
    "{% generation %}{{ '\n' + m.content + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Generation marks around the answer only.
BARE_MARKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
