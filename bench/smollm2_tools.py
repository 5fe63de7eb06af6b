"""SmolLM2 learns to use a calculator on word problems: `python bench/smollm2_tools.py MODEL [--seed N]`.

MODEL is the directory of SmolLM2-135M-Instruct that bench/real_models.py fetches. The problems have one step
and numbers that the model cannot work out itself. The rate of episodes with a valid call is measured first,
on 128 held-out problems. Where it is under 5 %, a short supervised warm-up shows the model how a call looks,
and it is measured again. Then `covey train` with the tool, and the same problems once more, the second time
with results that belong to other calls: who reads them is wrong then.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import covey
from covey.data.text import TextCodec, load_codec
from covey.environments.schema import schema_of
from covey.quickstart.calculator import calculate as calculator

_TRAINED, _HELD_OUT, _SHOWN = 2_000, 128, 2
_SEED = 20_262
_TEMPLATE, _TOOL = "chatml-tools", "covey.quickstart.calculator:calculate"
_COMPLETION = 96
_STEPS, _BATCH, _RATE = 16, 32, 3e-5

_LEAST_CALLS = 0.05  # below, there is a warm-up
_WARM_STEPS, _WARM_BATCH, _WARM_RATE = 20, 4, 1e-4
# How often each way is taken in the warm-up.
_RIGHT_CALL, _WRONG_CALL = 0.40, 0.25  # else a guess
_RIGHT_READING = 0.65

_THINGS = ("apples", "coins", "books", "pens", "shells", "cards", "stamps", "balls")
_TIMES = (
    "A box holds {a} {things}. How many {things} do {b} boxes hold?",
    "Each of {b} children has {a} {things}. How many {things} do they have together?",
)
_PLUS = (
    "A shop has {a} {things} and buys {b} more. How many {things} does it have now?",
    "One bag holds {a} {things}, another one {b}. How many {things} do they hold together?",
)
_MINUS = (
    "A shop had {a} {things} and sold {b}. How many {things} are left?",
    "There are {a} {things}, and {b} are broken. How many {things} are whole?",
)
_OPERATORS = {
    "*": (_TIMES, range(12, 100), range(12, 100)),
    "+": (_PLUS, range(1000, 10_000), range(200, 1000)),
}
_OPERATORS["-"] = (_MINUS, *_OPERATORS["+"][1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Holds a question and the expression that answers it."""

    question: str
    a: int
    operator: str
    b: int

    @property
    def row(self) -> dict[str, Any]:
        """The row of a data set."""
        gold = calculator(f"{self.a}{self.operator}{self.b}")
        return {"messages": [{"role": "user", "content": self.question}], "solution": gold}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Holds the records of one sampled episode of each held-out problem."""

    records: list[dict[str, Any]]
    seconds: float

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        return sum(record["reward"] for record in self.records) / len(self.records)

    @property
    def calls(self) -> float:
        """The share of episodes with a call that did not fail."""
        return sum(map(_has_call, self.records)) / len(self.records)

    def line(self, when: str) -> str:
        """A line of the table."""
        return f"{when:28} {self.calls:11.3f} {self.accuracy:9.3f} {self.seconds:8.0f}"


def problems() -> list[Problem]:
    """Different problems, half of them products; the last 128 are held out."""
    rng = random.Random(_SEED)
    found: dict[str, Problem] = {}
    while len(found) < _TRAINED + _HELD_OUT:
        operator = rng.choice("**+-")
        forms, first, second = _OPERATORS[operator]
        a, b = rng.choice(first), rng.choice(second)
        question = rng.choice(forms).format(a=a, b=b, things=rng.choice(_THINGS))
        found[question] = Problem(question=question, a=a, operator=operator, b=b)
    return list(found.values())


def conversation(problem: Problem, rng: random.Random) -> list[dict[str, Any]]:
    """A conversation of the warm-up, which goes one of the ways at random; all numbers that should be worked
    out are drawn, so that no right result is ever seen."""
    asked = {"role": "user", "content": problem.question}
    result = str(rng.randrange(100, 10_000))
    way = rng.random()
    if way >= _RIGHT_CALL + _WRONG_CALL:
        return [asked, {"role": "assistant", "content": f"The answer is {result}."}]
    others = [operator for operator in _OPERATORS if operator != problem.operator]
    operator = problem.operator if way < _RIGHT_CALL else rng.choice(others)
    call = {"name": "calculate", "arguments": {"expression": f"{problem.a}{operator}{problem.b}"}}
    read = result if rng.random() < _RIGHT_READING else result[:-1]
    return [
        asked,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": f"The answer is {read}."},
    ]


def warm_up(directory: Path, trained: list[Problem], target: Path, seed: int) -> None:
    """Take supervised steps on rendered conversations, the loss on the turns of the assistant alone, and save
    the model with its tokenizer."""
    rng = random.Random(seed)
    codec = load_codec(directory, chat_template=_TEMPLATE)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_WARM_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    began = time.perf_counter()
    for number in range(1, _WARM_STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = _WARM_RATE * min(number / 5, 1.0, 4 * (_WARM_STEPS + 1 - number) / _WARM_STEPS)
        rows = [encode(codec, conversation(rng.choice(trained), rng)) for _ in range(_WARM_BATCH)]
        loss = _loss(model, rows)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if number % 5 == 1:
            _say(f"  warm-up step {number:3d}  loss {loss.item():.3f}  {time.perf_counter() - began:.0f} s")
    model.save_pretrained(target)
    for file in directory.glob("*token*"):
        shutil.copy(file, target)


def encode(codec: TextCodec, messages: list[dict[str, Any]]) -> list[tuple[int, bool]]:
    """The tokens of a conversation, each with whether the assistant writes it; turns are encoded apart, as a
    rollout has them."""
    schemas, done, tokens = [schema_of(calculator)], "", []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opened = codec.render(messages[:number], tools=schemas)
        closed = codec.render(messages[: number + 1], tools=schemas, add_generation_prompt=False)
        for text, is_learned in ((opened[len(done) :], False), (closed[len(opened) :].rstrip("\n"), True)):
            ids = codec.tokenizer.encode(text, add_special_tokens=False).ids
            tokens += [(token, is_learned) for token in ids]
        done = closed.rstrip("\n")
    return tokens


def _loss(model: Any, rows: list[list[tuple[int, bool]]]) -> torch.Tensor:
    """The mean loss of the learned tokens; what all rows begin with is computed once."""
    columns = zip(*rows, strict=False)
    shared = next(n for n, column in enumerate(columns) if len(set(column)) > 1)
    ids_BT = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor([token for token, _ in row[shared:]]) for row in rows], batch_first=True
    )
    # Padding on the right needs no mask: causal attention never looks at it from a learned position.
    is_learned_BT = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor([learned for _, learned in row[shared:]]) for row in rows], batch_first=True
    )
    begin = torch.tensor([[token for token, _ in rows[0][:shared]]])
    cache = model.model(input_ids=begin, use_cache=True).past_key_values
    cache.batch_repeat_interleave(len(rows))
    hidden_BTD = model.model(input_ids=ids_BT, past_key_values=cache).last_hidden_state
    predicts_BT = is_learned_BT[:, 1:]
    logits_NV = model.lm_head(hidden_BTD[:, :-1][predicts_BT])
    return F.cross_entropy(logits_NV, ids_BT[:, 1:][predicts_BT])


def other_results() -> Callable[[str], str]:
    """A calculator that gives each call the result of the call before it."""
    last = "0"

    def calculate(expression: str) -> str:
        nonlocal last
        told, last = last, calculator(expression)
        return told

    calculate.__doc__ = calculator.__doc__
    return calculate


def measure(model: Path, held_out: Path, output: Path, tool: Any = _TOOL) -> Measured:
    """Sample one episode of each held-out problem at temperature 1."""
    began = time.perf_counter()
    covey.evaluate(
        str(model),
        val_dataset=str(held_out),
        reward_funcs="accuracy",
        tools=[tool],
        chat_template=_TEMPLATE,
        max_completion_length=_COMPLETION,
        num_generations_eval=1,
        eval_temperature=1.0,
        output_dir=str(output),
    )
    records = [json.loads(line) for line in (output / f"{held_out.stem}.jsonl").read_text().splitlines()]
    return Measured(records=records, seconds=time.perf_counter() - began)


def train(model: Path, dataset: Path, run: Path, seed: int) -> Any:
    """`covey train` with the tool."""
    return covey.train(
        model=str(model),
        dataset=str(dataset),
        reward_funcs="accuracy",
        tools=[_TOOL],
        chat_template=_TEMPLATE,
        max_completion_length=_COMPLETION,
        num_generations=8,
        per_device_train_batch_size=_BATCH,
        learning_rate=_RATE,
        max_steps=_STEPS,
        seed=seed,
        save_only_model=True,
        output_dir=str(run),
    )


def main() -> None:
    """Measure, warm up where it is needed, train, measure, and show conversations."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/smollm2-tools"))
    arguments = parser.parse_args()
    began = time.perf_counter()
    run: Path = arguments.output_dir
    data = run.with_name(f"{run.name}-data")
    data.mkdir(parents=True, exist_ok=True)
    dataset, held_out = data / "train.jsonl", data / "held_out.jsonl"
    every = problems()
    _write(dataset, every[:_TRAINED])
    _write(held_out, every[_TRAINED:])

    start, lines = arguments.model, []
    before = measure(start, held_out, data / "untrained")
    lines.append(before.line("untrained"))
    _say(f"untrained: {before.calls:.1%} of episodes have a valid call; accuracy {before.accuracy:.3f}")
    if before.calls < _LEAST_CALLS:
        _say(f"under {_LEAST_CALLS:.0%}: warm-up, {_WARM_STEPS} steps of {_WARM_BATCH} conversations")
        start, warming = data / "warm", time.perf_counter()
        warm_up(arguments.model, every[:_TRAINED], start, arguments.seed)
        seconds = time.perf_counter() - warming
        before = measure(start, held_out, data / "warmed")
        lines += [_time("warm-up", seconds), before.line("after the warm-up")]
    training = time.perf_counter()
    outcome = train(start, dataset, run, arguments.seed)
    lines.append(_time(f"training, {outcome.step} steps", time.perf_counter() - training))
    after = measure(outcome.checkpoint, held_out, data / "after")
    other = measure(outcome.checkpoint, held_out, data / "others", other_results())
    lines += [after.line("after the training"), other.line("with results of other calls")]
    for number in range(_SHOWN):
        _say(f"\n{every[_TRAINED + number].question}  (gold {every[_TRAINED + number].row['solution']})")
        _say(f"  before  {_said(before.records[number])}\n  after   {_said(after.records[number])}")
    lines.append(_time("in all", time.perf_counter() - began))
    _say(f"\n{'':28} {'valid calls':>11} {'accuracy':>9} {'seconds':>8}\n" + "\n".join(lines))
    _say(f"\nreward of each step  {_curve(run)}\nreward plot          {run}/reward.png")
    _say(f"model                {outcome.checkpoint}")


def _time(what: str, seconds: float) -> str:
    return f"{what:28} {'':11} {'':9} {seconds:8.0f}"


def _has_call(record: dict[str, Any]) -> bool:
    results = [result for turn in record["turns"] for result in turn["results"]]
    return any(result["failure"] is None for result in results)


def _curve(run: Path) -> str:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return " ".join(f"{line['reward']:.2f}" for line in lines if "reward" in line)


def _write(path: Path, rows: list[Problem]) -> None:
    path.write_text("".join(json.dumps(problem.row) + "\n" for problem in rows), encoding="utf-8")


def _said(record: dict[str, Any]) -> str:
    parts = []
    for turn in record["turns"]:
        parts += [turn["text"], *(f"[{result['content']}]" for result in turn["results"])]
    mark = "right" if record["reward"] else "wrong"
    return f"{mark}  {' '.join(' '.join(parts).split())}"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
