"""Six small chat templates that treat tools, calls and results as those of models do.

All take messages whose `content` is text and `tool_calls` whose arguments are objects. What they tell a model
about its tools is shorter than in the templates that they stand for.
"""

from __future__ import annotations

from dataclasses import replace

from covey.data.template import CHATML, compiled
from covey.data.text import TextCodec

QWEN2_5 = r"""
{%- set has_system = messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + (messages[0].content if has_system else 'You are a helpful assistant.') }}
{%- if tools %}
    {{- '\n\n# Tools\n<tools>' }}
    {%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
    {{- '\n</tools>\nCall as <tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for message in (messages[1:] if has_system else messages) %}
    {%- if message.role == 'tool' %}
        {{- '' if loop.previtem and loop.previtem.role == 'tool' else '<|im_start|>user' }}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {{- '' if loop.nextitem and loop.nextitem.role == 'tool' else '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role }}
        {{- '\n' + message.content if message.content or not message.tool_calls else '' }}
        {%- for call in message.tool_calls or () %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
"""hermes calls; a system message of its own; a turn that only calls begins without the line of its text."""

QWEN3 = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' + (messages[0].content + '\n\n' if messages[0].role == 'system' else '') }}
    {{- '# Tools\n<tools>' }}
    {%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
    {{- '\n</tools>\nCall as <tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>' }}
    {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set asked = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '' if loop.previtem and loop.previtem.role == 'tool' else '<|im_start|>user' }}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {{- '' if loop.nextitem and loop.nextitem.role == 'tool' else '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
        {%- set thought = message.content.split('</think>')[0] if '</think>' in message.content else '' %}
        {%- set thought = thought.split('<think>')[-1].strip('\n') %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > asked.last and (loop.last or thought) %}
            {{- '<think>\n' + thought + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or () %}
            {{- '\n' if content or not loop.first else '' }}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {{- '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else '' }}
{%- endif %}
"""
"""hermes calls; thoughts before the last message of the user are removed from history, so prefixes change."""

QWEN3_CODER = r"""
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if system or tools %}
    {{- '<|im_start|>system\n' + system }}
    {%- if tools %}
        {{- '\n\n# Tools\n<tools>' }}
        {%- for tool in tools %}{{ '\n<function>' + (tool.function | tojson) + '</function>' }}{% endfor %}
        {{- '\n</tools>\nCall as <tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>' }}
        {{- '\n</function>\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '' if loop.previtem and loop.previtem.role == 'tool' else '<|im_start|>user\n' }}
        {{- '<tool_response>\n' + message.content + '\n</tool_response>\n' }}
        {{- '' if loop.nextitem and loop.nextitem.role == 'tool' else '<|im_end|>\n' }}
    {%- elif message.role != 'system' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {{- '\n' + (message.content | trim) + '\n' if message.content | trim else '' }}
        {%- for call in message.tool_calls %}
            {{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
            {%- for key, value in call.function.arguments | items %}
                {%- set is_text = value is not mapping and (value is string or value is not sequence) %}
                {{- '<parameter=' + key + '>\n' + (value | string if is_text else value | tojson) }}
                {{- '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role != 'system' %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
"""qwen3_xml calls; text in front of a call is trimmed, and so differs from what the model wrote."""

LLAMA3_1 = r"""
{{- bos_token }}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' + ('Environment: ipython\n' if tools else '') }}
{{- 'Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n' + system + '<|eot_id|>' }}
{%- for message in rest %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length > 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- elif message.role in ('tool', 'ipython') %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (message.content | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
        {%- if tools and loop.first %}
            {{- 'Answer with {"name": function name, "parameters": dictionary of arguments}.\n\n' }}
            {%- for tool in tools %}{{ (tool | tojson(indent=4)) + '\n\n' }}{% endfor %}
        {%- endif %}
        {{- (message.content | trim) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""
"""llama3_json calls, one a turn; its text is lost; results are JSON text under role ipython; tools stand in
the first message of the user."""

GLM = r"""
{{- '[gMASK]<sop>' }}
{%- if tools %}
    {{- '<|system|>\n# Tools\n<tools>' }}
    {%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
    {{- '\n</tools>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '' if loop.previtem and loop.previtem.role == 'tool' else '<|observation|>' }}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
    {%- else %}
        {{- '<|' + message.role + '|>' + ('\n' + message.content if message.content else '') }}
        {%- for call in message.tool_calls or () %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
"""hermes calls; no turn has an end of its own: the model ends its turn with the mark of the next role,
`<|observation|>` behind a call and `<|user|>` else. (GLM's own calls have another format.)"""

PLAIN_CHATML = CHATML
"""It writes no tools: conversations with and without them are the same prompt."""

TOOL_TEMPLATES = {
    "qwen2_5": QWEN2_5,
    "qwen3": QWEN3,
    "qwen3_coder": QWEN3_CODER,
    "llama3_1": LLAMA3_1,
    "glm": GLM,
    "plain_chatml": PLAIN_CHATML,
}
"""The six by name."""

FORMATS = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_coder": "qwen3_xml",
    "llama3_1": "llama3_json",
    "glm": "hermes",
    "plain_chatml": None,
}
"""The format of calls of each; None: it has none."""


def with_template(codec: TextCodec, template: str) -> TextCodec:
    """Return the codec with another template; its end tokens stay those of the model."""
    made = compiled(template, "the template of a test")
    return replace(codec, chat_template=made, template_text=template, trial=None)
