"""Chat templates for the tests: each has one habit of the stock templates that breaks naive continuation."""

# ruff: noqa: E501 - a template breaks where its output does

from __future__ import annotations

CALLS = """\
{%- for call in message.tool_calls or [] %}
{%- if (loop.first and message.content) or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}"""

TOOLS = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n\\nCall:\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}"""

RESULTS = """\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"""

QWEN3 = (
    TOOLS
    + """
{%- set ns = namespace(scan=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
{%- set index = (messages | length - 1) - loop.index0 %}
{%- if ns.scan and message.role == 'user' and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
{%- set ns.scan = false %}{%- set ns.last = index %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}
{%- set reasoning = '' %}
{%- if message.reasoning_content is defined and message.reasoning_content %}
{%- set reasoning = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}
{{- '<|im_start|>assistant\\n' + content }}
{%- endif %}
"""
    + CALLS
    + """
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
"""
    + RESULTS
    + """
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
)
"""Qwen3: empty thinking in the last reply, thinking dropped from earlier ones, arguments re-spaced."""

HERMES = (
    TOOLS
    + """
{%- if not tools and messages[0].role != 'system' %}{{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) or (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>' + message.role }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' }}{{- call.function.name }}{{- '", "arguments": ' }}{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
"""
    + RESULTS
    + """
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)
"""Qwen2.5 and Hermes: a default system message, no thinking. Append-only."""

TRIMS = HERMES.replace("message.content", "(message.content | trim)")
"""Trims every content."""

REORDERS = HERMES.replace("arguments | tojson", "arguments | tojson(sort_keys=true)").replace(
    "tool | tojson", "tool | tojson(sort_keys=true)"
)
"""Writes arguments and tools with sorted keys."""

ASCII = HERMES.replace("tool | tojson", "tool | tojson(ensure_ascii=true)").replace(
    "arguments | tojson", "arguments | tojson(ensure_ascii=true)"
)
"""Escapes everything outside ASCII in JSON."""

OPENS_THINKING = (
    TOOLS
    + """
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{- raise_exception('System message must be at the beginning.') }}
{%- elif message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n<think>\\n' + (message.reasoning_content or '') | trim + '\\n</think>\\n\\n' + message.content | trim }}
"""
    + CALLS
    + """
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
"""
    + RESULTS
    + """
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""
)
"""Qwen3.5: the generation prompt opens thinking; a system message in the middle is refused."""

ROLE_STOP = """\
{{- '[gMASK]<sop>' }}
{%- if tools %}{{- '<|system|>\\n# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- 'Call with <tool_call>{"name":, "arguments":}' }}{%- endif %}
{%- for message in messages %}
{%- if message.role in ['user', 'system'] %}{{- '<|' + message.role + '|>\\n' + message.content }}
{%- elif message.role == 'assistant' %}{{- '<|assistant|>\\n' + message.content }}
"""
ROLE_STOP += (
    CALLS
    + """
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"""
)
"""GLM: a turn has no close; the token that ends it is the next role's."""

LLAMA = """\
{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{%- set role = 'ipython' %}{%- else %}{%- set role = message.role %}{%- endif %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
"""Llama 3: BOS written by the template, no newline after the close, no known call format."""

HOISTS = """\
{%- for message in messages if message.role == 'system' %}{{- message.content }}{%- endfor %}
{%- for message in messages if message.role != 'system' %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""DeepSeek V3: all system messages are moved to the front."""

GLUES = (
    """\
{%- for tool in tools or [] %}{%- for key in tool.function.parameters.properties %}{{- '<' + key + '>' }}{%- endfor %}{{- '<tool_call> arguments' }}{%- endfor %}
"""
    + """
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)
"""Qwen3-Coder: brackets written around a caller's key."""

CHATML_FAMILY = {
    "qwen3": QWEN3,
    "hermes": HERMES,
    "trims": TRIMS,
    "reorders": REORDERS,
    "ascii": ASCII,
    "opens_thinking": OPENS_THINKING,
}

HARMONY_TOKENS = ["<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|channel|>", "<|constrain|>"]
HARMONY = """{% if tools %}<|start|>developer<|message|>{% for tool in tools %}// {{ tool.function.description }}
type {{ tool.function.name }} = (_: {
{% for k in tool.function.parameters.properties %}{{ k }}: string,
{% endfor %}}) => any;
{% endfor %}<|end|>{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|start|>functions.bash to=assistant{{
'<|channel|>commentary<|message|>' }}{{ m.content | tojson }}<|end|>{% elif m.tool_calls %}<|start|>assistant to=functions.{{
m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson
}}<|call|>{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{%
else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt
%}<|start|>assistant{% endif %}"""
"""gpt-oss: text is marked up, tools are types."""

MISTRAL_TOKENS = [
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
]
MISTRAL = """<s>{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.first %}{{ tools | tojson
}}{% endif %}[INST] {{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% elif
m.role == 'assistant' %}{{ m.content }}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{
c.function.arguments | tojson }}{% endfor %}</s>{% else %}{{ m.content }}{% endif %}{% endfor %}"""
"""Mistral: the model's turn goes on behind a tool's result."""
