"""Build the embedded model: a tokenizer and a small Qwen2, warmed up from random weights.

Run as `python bench/make_model.py [--out DIR]`. The warm-up is supervised and ends while the
model is still wrong on most samples, so that reinforcement learning has both successes and failures to
learn from. Equal seeds on equal hardware and library versions give equal files.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

from covey.quickstart import task
from covey.quickstart.task import Pair

# The name of the padding token is the default of Qwen2's tokenizer class for unset special tokens. Another
# name would make transformers add a token beyond the model's vocabulary on loading.
IM_START, IM_END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL_TOKENS = (IM_START, IM_END, PAD)
TAG_TOKENS = ("<think>", "</think>", "<answer>", "</answer>")
VOCABULARY = 320
MAX_POSITIONS = 2048

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- endif %}"
)

# The merges come from these lines. Words of the chat format recur, so that each becomes one token.
_MERGE_LINES = (
    *("user", "assistant", "system", "What is ") * 8,
    *("What is the sum of", "Think and answer", "You are a helpful assistant") * 2,
    "The answer is the number that you think of",
)

_SEED = 7
_THREADS = 2
_BATCH = 64
_LEARNING_RATE = 2e-3
_RAMP_STEPS = 50
_MAX_STEPS = 3000
_IGNORED = -100
# Smoothing keeps about one percent of every token's probability on other tokens. Without it the format is
# near perfect long before the sums are, and a reward for the format would find nothing left to teach.
_LABEL_SMOOTHING = 0.01
_VALIDATION = 1024
_MAX_NEW_TOKENS = 20
# Sampled accuracy is near zero while the loss lies above this, so measuring would waste time.
_MEASURE_BELOW_LOSS = 0.345
_MEASURE_EVERY = 20
_ACCURACY_RANGE = (0.33, 0.38)
_HELD_OUT_LIMIT = 0.40

_ANSWERED = re.compile(r"<think>[^<]*</think><answer>(\d+)</answer>")


@dataclass(frozen=True)
class Figures:
    """Shares of sampled completions: `accuracy` is well-formed and right, `formatted` is well-formed."""

    accuracy: float
    formatted: float


def make_tokenizer(
    vocabulary: int = VOCABULARY,
    merge_lines: Sequence[str] = _MERGE_LINES,
    tags: Sequence[str] = TAG_TOKENS,
    chat_template: str = CHAT_TEMPLATE,
) -> Qwen2Tokenizer:
    """Train the byte-level tokenizer with single-digit numbers and the ChatML template.

    The tags of the answer format are ordinary added tokens: decoding that skips special tokens keeps them.
    """
    # AutoTokenizer picks the class by the model's type, and that class brings its own text pipeline. The
    # merges are trained in this very pipeline, so that tokenizer.json alone and AutoTokenizer always agree.
    pipeline = Qwen2Tokenizer().backend_tokenizer
    core = Tokenizer(models.BPE())
    core.normalizer = pipeline.normalizer
    core.pre_tokenizer = pipeline.pre_tokenizer
    core.decoder = pipeline.decoder
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(SPECIAL_TOKENS) - len(tags),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(merge_lines, trainer)
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in tags])
    return Qwen2Tokenizer(
        tokenizer_object=core,
        unk_token=PAD,
        eos_token=IM_END,
        pad_token=PAD,
        extra_special_tokens=[IM_START],
        chat_template=chat_template,
        model_max_length=MAX_POSITIONS,
        padding_side="left",
    )


def make_random_model(
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: int = VOCABULARY,
    num_layers: int = 4,
    intermediate_size: int = 384,
) -> Qwen2ForCausalLM:
    """Return the float32 model with random weights from torch's global generator."""
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config).float()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def warm_up_pairs() -> list[Pair]:
    """Return the training pairs that the warm-up learns from."""
    return task.training_pairs()[_VALIDATION:]


def validation_pairs() -> list[Pair]:
    """Return the training pairs whose sampled accuracy ends the warm-up.

    The warm-up does not learn from them, so their accuracy predicts that on the held-out pairs.
    """
    return task.training_pairs()[:_VALIDATION]


def target_text(a: int, b: int) -> str:
    """Return the correct completion for one pair, without the end-of-turn token."""
    return f"<think>{a}+{b}</think><answer>{a + b}</answer>"


def prompt_ids(tokenizer: PreTrainedTokenizerBase, pair: Pair) -> list[int]:
    """Return the token ids of the question in the chat format, up to the assistant's turn."""
    text = f"{IM_START}user\n{task.prompt_text(*pair)}{IM_END}\n{IM_START}assistant\n"
    return tokenizer.encode(text, add_special_tokens=False)


def completion_ids(tokenizer: PreTrainedTokenizerBase, pair: Pair) -> list[int]:
    """Return the token ids of the correct completion, closed by the end-of-turn token."""
    return tokenizer.encode(target_text(*pair) + IM_END, add_special_tokens=False)


@torch.no_grad()
def sample_figures(
    model: Any, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair], seed: int, samples: int = 1
) -> Figures:
    """Sample completions at temperature 1 and return the shares that are right and well-formed.

    Prompts of one token length form one batch, which therefore needs no padding. The caller's global
    generator is left as it was.
    """
    by_length: dict[int, list[tuple[Pair, list[int]]]] = defaultdict(list)
    for pair in pairs:
        ids = prompt_ids(tokenizer, pair)
        by_length[len(ids)].append((pair, ids))
    right = formatted = 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for length, group in sorted(by_length.items()):
            prompt_BT = torch.tensor([ids for _, ids in group for _ in range(samples)])
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
            sums = [a + b for (a, b), _ in group for _ in range(samples)]
            for text, total in zip(texts, sums, strict=True):
                match = _ANSWERED.fullmatch(text)
                formatted += match is not None
                right += match is not None and match[1] == str(total)
    count = len(pairs) * samples
    return Figures(right / count, formatted / count)


def _encode(tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and next-token labels of all pairs; only completion tokens carry a label."""
    sequences, labels = [], []
    for pair in pairs:
        prompt, completion = prompt_ids(tokenizer, pair), completion_ids(tokenizer, pair)
        sequences.append(torch.tensor(prompt + completion))
        labels.append(torch.tensor([_IGNORED] * (len(prompt) - 1) + completion + [_IGNORED]))
    # Padding on the right needs no mask: causal attention never looks at it from a labelled position.
    pad_id = tokenizer.pad_token_id
    return (
        torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=pad_id),
        torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=_IGNORED),
    )


def _batches(count: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield index batches without end; each pass is a new permutation."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).split(_BATCH)


@dataclass
class _WarmUp:
    """The state of the warm-up, with a copy of the last measured state to fall back to."""

    model: Any
    optimizer: torch.optim.Optimizer
    learning_rate: float = _LEARNING_RATE
    interval: int = _MEASURE_EVERY
    _saved: tuple[dict[str, Any], dict[str, Any]] | None = field(default=None, repr=False)

    def step(self, number: int, tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * min(1.0, number / _RAMP_STEPS)
        logits_BTV = self.model(input_ids=tokens_BT, use_cache=False).logits
        loss = F.cross_entropy(
            logits_BTV.flatten(0, 1),
            labels_BT.flatten(),
            ignore_index=_IGNORED,
            label_smoothing=_LABEL_SMOOTHING,
        )
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    def keep(self) -> None:
        self._saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def fall_back(self) -> None:
        """Return to the last kept state and approach the range in smaller strides."""
        if self._saved is not None:
            self.model.load_state_dict(self._saved[0])
            self.optimizer.load_state_dict(copy.deepcopy(self._saved[1]))
        self.learning_rate /= 2
        self.interval = max(2, self.interval // 2)


def warm_up(model: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """Train on completions until the sampled accuracy on validation pairs first lies in the range.

    Returns the number of steps. The accuracy rises steeply: a measurement above the range undoes the steps
    since the last one and repeats them at half the learning rate.
    """
    pairs = warm_up_pairs()
    validation = validation_pairs()
    tokens_NT, labels_NT = _encode(tokenizer, pairs)
    state = _WarmUp(model, torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.01))
    state.keep()
    low, high = _ACCURACY_RANGE
    losses: list[float] = []
    since_measured = 0
    for number, index_B in enumerate(_batches(len(pairs), _SEED), start=1):
        if number > _MAX_STEPS:
            raise RuntimeError(f"the accuracy never lay in {low}..{high} within {_MAX_STEPS} steps")
        losses.append(state.step(number, tokens_NT[index_B], labels_NT[index_B]))
        since_measured += 1
        if since_measured < state.interval:
            continue
        since_measured = 0
        loss = sum(losses[-state.interval :]) / state.interval
        if loss > _MEASURE_BELOW_LOSS:
            sys.stdout.write(f"step {number:4d}  loss {loss:.3f}\n")
            continue
        figures = sample_figures(model, tokenizer, validation, seed=number)
        sys.stdout.write(
            f"step {number:4d}  loss {loss:.3f}  accuracy {figures.accuracy:.3f}"
            f"  formatted {figures.formatted:.3f}\n"
        )
        sys.stdout.flush()
        if low <= figures.accuracy <= high:
            return number
        if figures.accuracy > high:
            state.fall_back()
        else:
            state.keep()
    raise AssertionError("unreachable: batches have no end")


def out_folder(arguments: Sequence[str] | None, default: Path) -> Path:
    """Read from the command line which folder to write."""
    parser = argparse.ArgumentParser(description="Build the model.")
    parser.add_argument("--out", type=Path, default=default, help="folder to write (default: %(default)s)")
    out: Path = parser.parse_args(arguments).out
    return out


def write_sizes(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write to standard output how large the vocabulary and the model are."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    sys.stdout.write(f"vocabulary {len(tokenizer)}, parameters {parameters:,}\n")


def save(model: Any, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Write the model and the tokenizer as one folder, and its size to standard output."""
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    files = [path for path in out.iterdir() if path.is_file()]
    for path in files:
        # The weights are created readable by their owner only, and an installed package keeps that.
        path.chmod(0o644)
    size = sum(path.stat().st_size for path in files)
    sys.stdout.write(f"saved {size:,} bytes to {out}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, measure and save the embedded model; return the exit status.

    Held-out pairs are sampled once, after the training, as a gate: a model above the limit is not saved.
    """
    out = out_folder(arguments, task.MODEL_DIR)
    torch.set_num_threads(_THREADS)
    torch.manual_seed(_SEED)
    tokenizer = make_tokenizer()
    model = make_random_model(tokenizer)
    write_sizes(model, tokenizer)
    started = time.perf_counter()
    steps = warm_up(model, tokenizer)
    seconds = time.perf_counter() - started
    figures = sample_figures(model, tokenizer, task.held_out_pairs(), seed=_SEED)
    sys.stdout.write(
        f"warm-up: {steps} steps, {seconds:.0f} s; held out, one sample each at temperature 1:"
        f" accuracy {figures.accuracy:.3f}, formatted {figures.formatted:.3f}\n"
    )
    if figures.accuracy > _HELD_OUT_LIMIT:
        sys.stderr.write(f"the accuracy on held-out pairs exceeds {_HELD_OUT_LIMIT}; nothing is saved\n")
        return 1
    save(model, tokenizer, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
