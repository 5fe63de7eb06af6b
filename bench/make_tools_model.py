"""Build the embedded model that calls a calculator: a tokenizer and a small Qwen2, warmed up from random
weights.

Run as `python bench/make_tools_model.py [--out DIR]`. The warm-up is supervised. It first teaches the model
to copy: an expression out of the question into a call, the result of the call into the answer. Then it
teaches it products, of which it gets most wrong, each way at random: it guesses, calls with another
operator, or leaves out the last digit of the result. Reinforcement learning has to find the way that is
right. All results in the warm-up are random numbers: the model never sees a product. Equal seeds on equal
hardware and library versions give equal files.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from make_model import IM_END, IM_START, make_random_model, make_tokenizer, out_folder, save, write_sizes
from transformers import PreTrainedTokenizerBase, Qwen2Tokenizer

from covey.quickstart import tools_task
from covey.quickstart.calculator import calculate
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
_BATCH = 32
_RAMP_STEPS = 50
_IGNORED = -100
_BETAS = (0.9, 0.98)
_COPY_STEPS, _COPY_RATE = 600, 2e-3
_MIXED_STEPS, _MIXED_RATE = 150, 1e-3

# How often each way is taken in the second part of the warm-up.
_RIGHT_CALL, _WRONG_CALL = 0.40, 0.25  # else a guess
_RIGHT_READING = 0.65

_ACCURACY_RANGE = (0.10, 0.35)
_MAX_NEW_TOKENS = 40
_CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>")

SYSTEM = (
    f'{IM_START}system\n<tools>\n{{"name": "calculate", "arguments": ["expression"]}}\n</tools>{IM_END}\n'
)
Part = tuple[str, bool]


def make_tools_tokenizer() -> Qwen2Tokenizer:
    """Train the tokenizer, with one token for each word of the format and for each tag."""
    return make_tokenizer(VOCABULARY, _MERGE_LINES, TAG_TOKENS, CHAT_TEMPLATE)


def prompt(question: str) -> str:
    """Return the first prompt of an episode, as the chat template writes it."""
    return f"{SYSTEM}{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n"


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


def any_reading(result: int, rng: random.Random) -> str:
    """Return the result, or at times the result without its last digit."""
    text = str(result)
    return text if rng.random() < _RIGHT_READING or len(text) < 3 else text[:-1]


def any_result(rng: random.Random) -> int:
    """Return a number of up to four digits, mostly of three or four, sometimes negative."""
    digits = rng.choices((1, 2, 3, 4), (1, 3, 8, 16))[0]
    number = rng.randrange(10 ** (digits - 1), 10**digits)
    return -number if digits < 3 and rng.random() < 0.3 else number


def copying_episode(rng: random.Random) -> list[Part]:
    """Return the parts of an episode that copies much: a long expression of any characters and a long
    result."""
    expression = "".join(rng.choices("0123456789+-*/", k=rng.randint(5, 16)))
    result = "".join(rng.choices("0123456789", k=rng.randint(1, 12)))
    return [
        (prompt(f"What is {expression}?"), False),
        (call(expression), True),
        (between(result), False),
        (reply(result), True),
    ]


def mixed_episode(pair: Pair, rng: random.Random) -> list[Part]:
    """Return the parts of an episode of the task, which goes one of the ways at random."""
    asked = (prompt(tools_task.prompt_text(*pair)), False)
    way = rng.random()
    if way >= _RIGHT_CALL + _WRONG_CALL:
        return [asked, (reply(any_result(rng)), True)]
    operator = "*" if way < _RIGHT_CALL else rng.choice("+-")
    expression = f"{pair[0]}{operator}{pair[1]}"
    result = any_result(rng)
    answer = any_reading(result, rng)
    return [asked, (call(expression), True), (between(result), False), (reply(answer), True)]


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
    """Train on episodes that copy, then on the mixture of training pairs."""
    rng = random.Random(_SEED)
    pairs = tools_task.training_pairs()
    train(model, tokenizer, lambda: copying_episode(rng), _COPY_STEPS, _COPY_RATE)
    train(model, tokenizer, lambda: mixed_episode(rng.choice(pairs), rng), _MIXED_STEPS, _MIXED_RATE)


def train(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    draw: Callable[[], list[Part]],
    steps: int,
    learning_rate: float,
) -> None:
    """Take steps on episodes that `draw` gives, at a rate that rises from 0 and at the end falls to 0."""
    # A new optimizer for each part: the small second moments of a loss near 0 would make its steps too long.
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=_BETAS, weight_decay=0.01)
    started = time.perf_counter()
    for number in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(number / _RAMP_STEPS, 1.0, 4 * (steps + 1 - number) / steps)
        tokens_BT, labels_BT = encode(tokenizer, [draw() for _ in range(_BATCH)])
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


def result_of(text: str) -> str | None:
    """Return what the calculator says to a turn; None where the turn calls nothing that can be read."""
    found = _CALL.search(text)
    if found is None:
        return None
    try:
        return calculate(json.loads(found[1])["arguments"]["expression"])
    except (ValueError, LookupError, TypeError):
        return None


@torch.no_grad()
def sample_turns(model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]]) -> list[str]:
    """Return one sampled turn of each prompt at temperature 1; prompts of one length form one batch."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for number, ids in enumerate(prompts):
        by_length[len(ids)].append(number)
    turns = [""] * len(prompts)
    for length, numbers in sorted(by_length.items()):
        prompt_BT = torch.tensor([prompts[number] for number in numbers])
        output_BT = model.generate(
            input_ids=prompt_BT,
            attention_mask=torch.ones_like(prompt_BT),
            max_new_tokens=_MAX_NEW_TOKENS,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
        texts = tokenizer.batch_decode(output_BT[:, length:], skip_special_tokens=True)
        for number, text in zip(numbers, texts, strict=True):
            turns[number] = text
    return turns


def sample_accuracy(
    model: Any, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair], seed: int, *, shift: int = 0
) -> float:
    """Return the share of sampled episodes whose answer is the product.

    With a `shift` each call is given the result of the one that stands so many places behind it. The
    caller's global generator is left as it was.
    """
    encode = tokenizer.encode
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        asked = [prompt(tools_task.prompt_text(*pair)) for pair in pairs]
        first = sample_turns(model, tokenizer, [encode(text, add_special_tokens=False) for text in asked])
        results = {n: found for n, text in enumerate(first) if (found := result_of(text)) is not None}
        given = list(results.values())
        given = given[shift:] + given[:shift]
        whole = [
            asked[n] + first[n] + IM_END + between(result) for n, result in zip(results, given, strict=True)
        ]
        second = sample_turns(model, tokenizer, [encode(text, add_special_tokens=False) for text in whole])
    answers = [(pairs[n], text) for n, text in zip(results, second, strict=True)]
    answers += [
        (pair, text) for n, (pair, text) in enumerate(zip(pairs, first, strict=True)) if n not in results
    ]
    return sum(text + IM_END == reply(a * b) for (a, b), text in answers) / len(pairs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, measure and save the embedded model; return the exit status.

    Held-out pairs are sampled once, after the training, as a gate: a model outside the range is not saved.
    """
    out = out_folder(arguments, tools_task.MODEL_DIR)
    torch.set_num_threads(_THREADS)
    torch.manual_seed(_SEED)
    tokenizer = make_tools_tokenizer()
    model = make_random_model(tokenizer, VOCABULARY, num_layers=3, intermediate_size=256)
    write_sizes(model, tokenizer)
    warm_up(model, tokenizer)
    accuracy = sample_accuracy(model, tokenizer, tools_task.held_out_pairs(), seed=_SEED)
    sys.stdout.write(f"held out, one sample each at temperature 1: accuracy {accuracy:.3f}\n")
    low, high = _ACCURACY_RANGE
    if not low <= accuracy <= high:
        sys.stderr.write(f"the accuracy on held-out pairs is not in {low}..{high}; nothing is saved\n")
        return 1
    save(model, tokenizer, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
