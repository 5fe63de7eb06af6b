"""Print what the prompts of a data set take of a machine's memory, and how long they take to read.

Rows of about 1,200 characters, messages with a `solution` beside them, are read as a run reads them, by one
process and by several at a time. Of each process its own memory (USS), its share of what it has in common
with others (PSS) and its peak are printed, less what Python and the libraries take. Run with
`python bench/prompt_memory.py [ROWS] [PROCESSES]`; 200,000 rows take some minutes on two cores.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_WORDS = 2_000
_ROW_WORDS = 150
_SELF = str(Path(__file__).resolve())


def main() -> None:
    """Read the rows with 1 process, then with PROCESSES, each time as nobody has read them before."""
    num_rows = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    most = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_model(work / "model")
        write_rows(work / "rows.jsonl", num_rows)
        write_rows(work / "few.jsonl", 10)
        for processes, name in ((1, "first"), (1, "again"), (most, "together")):
            cache = work / ("one" if processes == 1 else "several")
            cache.mkdir(exist_ok=True)
            _report(name, _measure(work, cache, processes))


def write_rows(path: Path, num_rows: int, *, suffix: str = "") -> None:
    """Rows in the form of messages, all different, of about 300 tokens each."""
    draw = random.Random(0)
    words = [_word(draw) for _ in range(_WORDS)]
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_rows):
            text = " ".join([f"Task {number}{suffix}:", *draw.choices(words, k=_ROW_WORDS)])
            row = {"messages": [{"role": "user", "content": text}], "solution": str(number)}
            file.write(json.dumps(row) + "\n")


def write_model(directory: Path) -> None:
    """What a run reads of a model before its weights: a tokenizer of these words, a template, a config."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    draw = random.Random(0)
    words = [_word(draw) for _ in range(_WORDS)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4_000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(["", *words])], trainer)
    directory.mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    settings = {"chat_template": template, "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1024},
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"max_position_embeddings": 8192},
    }
    (directory / "config.json").write_text(json.dumps(config))


def start(work: Path, cache: Path, rank: int, processes: int) -> subprocess.Popen[str]:
    """A process that reads the rows of `work`, prints its numbers, and ends once its input is closed."""
    environment = {**os.environ, "TMPDIR": str(cache), "RANK": str(rank), "WORLD_SIZE": str(processes)}
    command = [sys.executable, _SELF, "--read", str(work)]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def memory() -> dict[str, int]:
    """Bytes of this process: `uss`, `pss`, `rss` now, and `peak`, of which files that are mapped are a
    part."""
    names = {"Private_Clean": "uss", "Private_Dirty": "uss", "Pss": "pss", "Rss": "rss", "Anonymous": "own"}
    found = dict.fromkeys(names.values(), 0)
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in names:
            found[names[name]] += int(value.split()[0]) * 1024
    status = Path("/proc/self/status").read_text()
    return {**found, "peak": int(status.partition("VmHWM:")[2].split()[0]) * 1024}


def read(work: Path) -> None:
    """Survey a run over the rows; print what that takes, and hold it until the input ends."""
    from covey.checks.survey import survey
    from covey.config.resolve import from_dict

    options: dict[str, Any] = {
        "model": str(work / "model"),
        "reward_funcs": ["accuracy"],
        "reward_trial": False,
        "num_generations": 4,
        "output_dir": str(work / "run"),
    }
    # What is imported on the way is no part of the prompts.
    with survey(from_dict({**options, "dataset": [str(work / "few.jsonl")]}, 1).config, 1):
        before = memory()
    started = time.perf_counter()
    with survey(from_dict({**options, "dataset": [str(work / "rows.jsonl")]}, 1).config, 1) as found:
        seconds = time.perf_counter() - started
        assert found.prompts is not None
        numbers = {"prompts": len(found.prompts.entries), "seconds": seconds}
        sys.stdout.write(json.dumps({"before": before, "peak": memory()["peak"], **numbers}) + "\n")
        sys.stdout.flush()
        sys.stdin.readline()
        sys.stdout.write(json.dumps(memory()) + "\n")
        sys.stdout.flush()
        sys.stdin.read()


def _measure(work: Path, cache: Path, processes: int) -> list[dict[str, Any]]:
    """The numbers of each process, taken while all of them hold their prompts."""
    children = [start(work, cache, rank, processes) for rank in range(processes)]
    found = [json.loads(child.stdout.readline()) for child in children if child.stdout]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    now = [json.loads(child.stdout.readline()) for child in children if child.stdout]
    for child in children:
        child.communicate()
    return [{**numbers, "now": memory} for numbers, memory in zip(found, now, strict=True)]


def _report(name: str, processes: list[dict[str, Any]]) -> None:
    for number, found in enumerate(processes):
        before, now = found["before"], found["now"]
        mb = {key: round((now[key] - before[key]) / 1e6) for key in ("own", "uss", "pss", "rss")}
        mb["peak"] = round((found["peak"] - before["rss"]) / 1e6)
        sizes = ", ".join(f"{key} {value:,} MB" for key, value in mb.items())
        sys.stdout.write(f"{name}, process {number}: {found['seconds']:.1f} s, {sizes}\n")
    total = sum(found["now"]["pss"] - found["before"]["pss"] for found in processes)
    sys.stdout.write(f"{name}: {len(processes)} together {total / 1e6:,.0f} MB (PSS)\n")
    sys.stdout.flush()


def _word(draw: random.Random) -> str:
    return "".join(draw.choices("aeioubcdfglmnprst", k=draw.randint(4, 9)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        read(Path(sys.argv[2]))
    else:
        main()
