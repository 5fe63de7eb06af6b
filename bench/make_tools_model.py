"""Build the embedded model that calls a calculator: a tokenizer and a small Qwen2, warmed up from random
weights.

Run as `python bench/make_tools_model.py [--out DIR]`. The warm-up is supervised. It first teaches the model
to copy: the numbers of a question into a call, the result of the call into the answer. Then it teaches it
to do so in some episodes only, and in others to guess, to call with a wrong expression or to misread the
result, at random. So most episodes are wrong, and reinforcement learning has to find the way that is right.
Results in the warm-up are random numbers: the model never sees a product. Equal seeds on equal hardware and
library versions give equal files.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from make_model import IM_END, IM_START, make_random_model, make_tokenizer, save
from transformers import PreTrainedTokenizerBase

from covey.quickstart import tools_task
from covey.quickstart.tools_task import Pair

VOCABULARY = 352
TAG_TOKENS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# Each turn goes on where the one before ended. Of a tool it writes the name and those of its arguments.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
    {{- '<tools>\\n' }}
    {%- for tool in tools %}
        {{- '{"name": "' + tool.function.name + '", "arguments": ' }}
        {{- tool.function.parameters.properties | list | tojson + '}\\n' }}
    {%- endfor %}
    {{- '</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- set given = call.function.arguments %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (given if given is string else given | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

# The merges come from these lines, so that each word of the chat format becomes one token.
_MERGE_LINES = (
    "system\n",
    "user\nWhat is ",
    "assistant\nThe answer is ",
    '{"name": "calculate", "arguments": ["expression"]}\n',
    '{"name": "calculate", "arguments": {"expression": "1"}}\n',
) * 8

_SEED = 11
_THREADS = 1
_BATCH = 64
_RAMP_STEPS = 50
_IGNORED = -100
_COPY_STEPS, _COPY_RATE = 400, 2e-3
_MIXED_STEPS, _MIXED_RATE = 200, 5e-4

# How often each way is taken in the second part of the warm-up.
_RIGHT_CALL, _WRONG_CALL = 0.35, 0.30  # else a guess
_RIGHT_READING = 0.65

SYSTEM = f'{IM_START}system\n<tools>\n{{"name": "calculate", "arguments": ["expression"]}}\n</tools>{IM_END}\n'
Part = tuple[str, bool]


def prompt(pair: Pair) -> str:
    """Return the first prompt of an episode, as the chat template writes it."""
    return f"{SYSTEM}{IM_START}user\n{tools_task.prompt_text(*pair)}{IM_END}\n{IM_START}assistant\n"


def call(expression: str) -> str:
    """Return a turn that calls the calculator, with the token that ends it."""
    arguments = f'{{"expression": "{expression}"}}'
    return f'<tool_call>\n{{"name": "calculate", "arguments": {arguments}}}\n</tool_call>{IM_END}'


def reply(number: int | str) -> str:
    """Return a turn that answers, with the token that ends it."""
    return f"The answer is {number}.{IM_END}"


def between(result: int | str) -> str:
    """Return what the chat template writes between a call and the next turn of the model."""
    told = f"<tool_response>\n{result}\n</tool_response>"
    return f"\n{IM_START}user\n{told}{IM_END}\n{IM_START}assistant\n"


def wrong_expression(pair: Pair, rng: random.Random) -> str:
    """Return an expression with another operator, or with the digits of one number in another order."""
    a, b = (str(number) for number in pair)
    ways = [f"{a}+{b}", f"{a}-{b}"]
    ways += [f"{a[::-1]}*{b}"] if a[::-1] != a and a[1] != "0" else []
    ways += [f"{a}*{b[::-1]}"] if b[::-1] != b and b[1] != "0" else []
    return rng.choice(ways)


def any_result(rng: random.Random) -> int:
    """Return a number of up to four digits, mostly of three or four, sometimes negative."""
    digits = rng.choices((1, 2, 3, 4), (1, 3, 8, 16))[0]
    number = rng.randrange(10 ** (digits - 1), 10**digits)
    return -number if digits < 3 and rng.random() < 0.3 else number


def episode(pair: Pair, rng: random.Random, is_mixed: bool) -> list[Part]:
    """Return the texts of an episode, each with whether the model learns to write it."""
    way = rng.random() if is_mixed else 0.0
    if way >= _RIGHT_CALL + _WRONG_CALL:
        return [(prompt(pair), False), (reply(any_result(rng)), True)]
    expression = f"{pair[0]}*{pair[1]}" if way < _RIGHT_CALL else wrong_expression(pair, rng)
    result = any_result(rng)
    is_read = not is_mixed or rng.random() < _RIGHT_READING
    return [
        (prompt(pair), False),
        (call(expression), True),
        (between(result), False),
        (reply(result if is_read else any_result(rng)), True),
    ]


def encode(
    tokenizer: PreTrainedTokenizerBase, episodes: Sequence[Sequence[Part]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and next-token labels (B, T); only what the model writes carries a label."""
    sequences, labels = [], []
    for parts in episodes:
        ids: list[int] = []
        learned: list[int] = []
        for text, is_learned in parts:
            own = tokenizer.encode(text, add_special_tokens=False)
            ids += own
            learned += own if is_learned else [_IGNORED] * len(own)
        sequences.append(torch.tensor(ids))
        labels.append(torch.tensor([*learned[1:], _IGNORED]))
    # Padding on the right needs no mask: causal attention never looks at it from a labelled position.
    return (
        torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=tokenizer.pad_token_id),
        torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=_IGNORED),
    )


def warm_up(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Train on episodes of training pairs: first on those that copy, then on the mixture."""
    _train(model, tokenizer, random.Random(_SEED), _COPY_STEPS, _COPY_RATE, is_mixed=False)
    _train(model, tokenizer, random.Random(_SEED), _MIXED_STEPS, _MIXED_RATE, is_mixed=True)


def _train(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    rng: random.Random,
    steps: int,
    learning_rate: float,
    *,
    is_mixed: bool,
) -> None:
    """Take steps at a rate that rises from 0 and falls to 0."""
    pairs = tools_task.training_pairs()
    # A new optimizer for each part: the small second moments of a loss near 0 would make its steps too long.
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    started = time.perf_counter()
    for number in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(number / _RAMP_STEPS, 1.0, 2 * (steps + 1 - number) / steps)
        batch = [episode(pair, rng, is_mixed) for pair in rng.sample(pairs, _BATCH)]
        tokens_BT, labels_BT = encode(tokenizer, batch)
        logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=_IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if number % 25 == 0:
            seconds = time.perf_counter() - started
            sys.stdout.write(f"step {number:4d}  loss {loss.item():.4f}  {seconds:.0f} s\n")
            sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Build and save the embedded model; return the exit status."""
    parser = argparse.ArgumentParser(prog="make_tools_model.py", description="Build the model.")
    parser.add_argument(
        "--out", type=Path, default=tools_task.MODEL_DIR, help="folder to write (default: %(default)s)"
    )
    out: Path = parser.parse_args(arguments).out
    torch.set_num_threads(_THREADS)
    torch.manual_seed(_SEED)
    tokenizer = make_tokenizer(VOCABULARY, _MERGE_LINES, TAG_TOKENS, CHAT_TEMPLATE)
    model = make_random_model(tokenizer, VOCABULARY, num_layers=3, intermediate_size=256)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    sys.stdout.write(f"vocabulary {len(tokenizer)}, parameters {parameters:,}\n")
    warm_up(model, tokenizer)
    size = save(model, tokenizer, out)
    sys.stdout.write(f"saved {size:,} bytes to {out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
