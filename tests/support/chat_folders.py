"""Folders of tokenizers with the chat formats of Qwen3, Qwen2.5, Llama 3, and of a character model.

The templates write the formats that these families read, in words of our own: headers, ends of turns, calls and
answers of tools, thinking. The tokenizers are byte-level with few merges, so that most characters beyond ASCII are
split over tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.tasks.tokenizer import write_character_tokenizer

FAMILIES = ("qwen3", "qwen2.5", "llama3", "characters")
CHARACTERS = "0123456789+-*= #>:<!abcdefghijklmnopqrstuvwxyzé→"
_QWEN_TOOLS = r"""
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- 'Tools that you may call:\n<tools>' }}
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\n</tools>\nA call is <tool_call>\n{"name": name, "arguments": object}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
"""
_QWEN_CALLS = r"""
{%- for call in message.tool_calls or [] %}
{%- if (loop.first and content) or not loop.first %}{{- '\n' }}{%- endif %}
{{- '<tool_call>\n{"name": "' }}{{- call.function.name }}{{- '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
"""
_QWEN_ANSWERS = r"""
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- elif message.role == 'user' or not loop.first %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
"""
QWEN3 = (
    r"{%- set last = namespace(query=-1) %}"
    r"{%- for message in messages %}{%- if message.role == 'user' %}{%- set last.query = loop.index0 %}{%- endif %}"
    r"{%- endfor %}"
    + _QWEN_TOOLS
    + r"""
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
{%- set thoughts = message.reasoning_content or '' %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > last.query and (loop.last or thoughts) %}
{{- '<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' }}
{%- endif %}
{{- content }}"""
    + _QWEN_CALLS
    + _QWEN_ANSWERS
    + r"""
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
)
QWEN25 = (
    _QWEN_TOOLS
    + r"""
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content = message.content %}
{{- '<|im_start|>assistant' }}{%- if content or not message.tool_calls %}{{- '\n' + content }}{%- else %}
{{- '\n' }}{%- endif %}"""
    + _QWEN_CALLS
    + _QWEN_ANSWERS
    + r"{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA3 = r"""{{- bos_token }}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}{{- 'Environment: ipython\n' }}{%- endif %}
{{- 'Today Date: ' + (date_string or '26 Jul 2024') + '\n\n' + system + '<|eot_id|>' }}
{%- set first = namespace(user=tools) %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at once, please') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- elif message.role in ('tool', 'ipython') %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{- message.content | tojson }}{{- '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
{%- if message.role == 'user' and first.user %}
{%- set first.user = none %}
{{- 'Functions that you may call, each by {"name": …, "parameters": …}:\n\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}
{%- endif %}
{{- message.content | trim }}{{- '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
_CORPUS = [
    "The answer is the sum of the two numbers, so the tool should be called with the text of the question.\n\n",
    '{"name": "search", "arguments": {"query": "the text"}}\n{"type": "function"}\n',
    "system user assistant tool thinking, thinking, thinking\n\n",
]
_QWEN_TOKENS = (
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    *((token, False) for name in ("think", "tool_call", "tool_response") for token in (f"<{name}>", f"</{name}>")),
)
_LLAMA_TOKENS = tuple(
    (f"<|{name}|>", True)
    for name in (
        "begin_of_text",
        "end_of_text",
        "start_header_id",
        "end_header_id",
        "eot_id",
        "eom_id",
        "python_tag",
    )
)


def write_chat_folder(folder: Path, family: str, template: str | None = None) -> Path:
    """Write a tokenizer's files, with another template than the family's if one is given. Returns the folder."""
    if family == "characters":
        write_character_tokenizer(folder, CHARACTERS)
        return folder
    tokens = _LLAMA_TOKENS if family == "llama3" else _QWEN_TOKENS
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        _CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=sorted(alphabet), show_progress=False)
    )
    backend.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in tokens])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    own = {"qwen3": QWEN3, "qwen2.5": QWEN25, "llama3": LLAMA3}[family]
    (folder / "chat_template.jinja").write_text(own if template is None else template, encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    if family == "llama3":
        ends = [backend.token_to_id(f"<|{name}|>") for name in ("end_of_text", "eom_id", "eot_id")]
        (folder / "generation_config.json").write_text(json.dumps(dict(eos_token_id=ends)), encoding="utf-8")
        config |= dict(bos_token="<|begin_of_text|>", eos_token="<|eot_id|>", pad_token="<|end_of_text|>")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
