"""Build the embedded model that sees: a tokenizer, an image processor and a small Qwen2.5-VL, warmed up from
random weights.

Run as `python bench/make_shapes_model.py [--out DIR]`. The warm-up is supervised, from the pixels on. It
first teaches the model to see: half of its drawings are described shape by shape, of the others a question is
answered. Then it blurs the answers: half of them are wrong, each of the wrong ones as often as another.
Reinforcement learning has to find out which are right. No drawing of the warm-up is a held-out one. Equal
seeds on equal hardware and library versions give equal files.
"""

from __future__ import annotations

import io
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from make_model import IM_END, IM_START, MAX_POSITIONS, make_tokenizer, out_folder, save, write_sizes
from PIL import Image
from tokenizers import AddedToken
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
)

from covey.quickstart import shapes_task
from covey.quickstart.shapes_task import Drawing

VOCABULARY = 352
VISION_START, VISION_END, IMAGE, VIDEO = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VISION_TOKENS = (VISION_START, VISION_END, IMAGE, VIDEO)
PATCH, MERGE, WINDOW = 4, 2, 16

# The content of a message is text, or blocks of text and images. Each image is one token here; whoever
# prepares the input of the model repeats it for each square of `PATCH * MERGE` pixels.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for block in message.content or [] %}
            {%- if block.type == 'image' or 'image' in block or 'image_url' in block %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif block.type == 'video' or 'video' in block %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- elif 'text' in block %}
                {{- block.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

DESCRIBE = "What is drawn?"

# The merges come from these lines, so that each word of the task becomes one token.
_MERGE_LINES = (
    "system\n",
    "user\nHow many circles squares triangles shapes are there?",
    "user\nWhich colour is the circle square triangle?",
    "assistant\nThe answer is red green blue yellow",
    "What is drawn?\n red circle, blue square, green triangle, yellow circle.",
) * 8

_SEED = 13
_THREADS = 1
_BATCH = 32
_RAMP_STEPS = 50
_IGNORED = -100
_BETAS = (0.9, 0.98)
_SEEING_STEPS, _SEEING_RATE = 5000, 1.5e-3
_BLURRING_STEPS, _BLURRING_RATE = 200, 5e-4
_DESCRIBED = 0.5
_WRONG = 0.5

_ACCURACY_RANGE = (0.35, 0.5)
_MAX_NEW_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Example:
    """A drawing, what is asked about it, and what the model is taught to say."""

    drawing: Drawing
    question: str
    said: str


@dataclass(frozen=True, slots=True)
class Seen:
    """Pictures as the model takes them: the pixels of all patches (N, 96), and the grid of each picture."""

    pixels_ND: torch.Tensor
    grid_B3: torch.Tensor

    @property
    def num_tokens(self) -> list[int]:
        """Count the image tokens of each picture."""
        return [int(count) // MERGE**2 for count in self.grid_B3.prod(-1)]


def make_shapes_tokenizer() -> Qwen2Tokenizer:
    """Train the tokenizer, with one token for each word of the task and for each mark of a picture."""
    tokenizer = make_tokenizer(VOCABULARY - len(VISION_TOKENS), _MERGE_LINES, (), CHAT_TEMPLATE)
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in VISION_TOKENS])
    return tokenizer


def make_image_processor() -> Qwen2VLImageProcessorPil:
    """Return the image processor, which leaves pictures of the task at their size."""
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
    )


def make_random_model(tokenizer: PreTrainedTokenizerBase) -> Qwen2_5_VLForConditionalGeneration:
    """Return the float32 model with random weights from torch's global generator."""
    hidden_size = 96
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    ids: dict[str, Any] = {token: tokenizer.convert_tokens_to_ids(token) for token in VISION_TOKENS}
    # With the usual 0.02 in layers this narrow, no gradient finds the pictures for thousands of steps.
    spread = {"initializer_range": 0.1}
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden_size,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "bos_token_id": None,
    }
    vision = {
        "depth": 2,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_heads": 3,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "window_size": WINDOW,
        "fullatt_block_indexes": [1],
        "out_hidden_size": hidden_size,
    }
    config = Qwen2_5_VLConfig(
        text_config=text | spread | ends,
        vision_config=vision | spread,
        image_token_id=ids[IMAGE],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
        tie_word_embeddings=True,
    )
    model = Qwen2_5_VLForConditionalGeneration(config).float()
    model.generation_config = GenerationConfig(**ends)
    return model


def prompt(question: str, num_image_tokens: int) -> str:
    """Return a prompt with one picture, as the chat template writes it, with all tokens of the picture."""
    picture = VISION_START + IMAGE * num_image_tokens + VISION_END
    return f"{IM_START}user\n{picture}{question}{IM_END}\n{IM_START}assistant\n"


def reply(answer: str) -> str:
    """Return a turn that answers, with the token that ends it."""
    return f"The answer is {answer}.{IM_END}"


def description(drawing: Drawing) -> str:
    """Return a turn that names each shape, row by row, with the token that ends it."""
    return ",".join(f" {shape.colour} {shape.kind}" for shape in drawing.shapes) + f".{IM_END}"


def seeing_example(drawing: Drawing, rng: random.Random) -> Example:
    """Return the description of a drawing, or its question with the right answer."""
    if rng.random() < _DESCRIBED:
        return Example(drawing, DESCRIBE, description(drawing))
    return Example(drawing, drawing.question, reply(drawing.answer))


def blurred_example(drawing: Drawing, rng: random.Random) -> Example:
    """Return the question of a drawing with the right answer, or as often with a wrong one."""
    answer = drawing.answer
    if rng.random() < _WRONG:
        answer = rng.choice([other for other in shapes_task.answers_to(drawing.question) if other != answer])
    return Example(drawing, drawing.question, reply(answer))


def look(processor: Qwen2VLImageProcessorPil, pictures: Sequence[bytes]) -> Seen:
    """Return pictures, given as the bytes of their files, as the model takes them."""
    images: list[Image.Image] = [Image.open(io.BytesIO(data)) for data in pictures]
    seen = processor(images, return_tensors="pt")
    return Seen(seen["pixel_values"], seen["image_grid_thw"])


def inputs(tokens_BT: torch.Tensor, attention_BT: torch.Tensor, seen: Seen, image_id: int) -> dict[str, Any]:
    """Return the arguments of a forward pass over prompts with one picture each."""
    return {
        "input_ids": tokens_BT,
        "attention_mask": attention_BT,
        "mm_token_type_ids": (tokens_BT == image_id).int(),
        "pixel_values": seen.pixels_ND,
        "image_grid_thw": seen.grid_B3,
    }


def encode(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], seen: Seen, image_id: int
) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the arguments of a forward pass and next-token labels (B, T); only what is said has labels."""
    sequences, labels = [], []
    for example, count in zip(examples, seen.num_tokens, strict=True):
        asked = tokenizer.encode(prompt(example.question, count), add_special_tokens=False)
        said = tokenizer.encode(example.said, add_special_tokens=False)
        sequences.append(torch.tensor(asked + said))
        labels.append(torch.tensor([_IGNORED] * (len(asked) - 1) + said + [_IGNORED]))
    pad = torch.nn.utils.rnn.pad_sequence
    tokens_BT = pad(sequences, batch_first=True, padding_value=tokenizer.pad_token_id)
    attention_BT = pad([torch.ones_like(sequence) for sequence in sequences], batch_first=True)
    labels_BT = pad(labels, batch_first=True, padding_value=_IGNORED)
    return inputs(tokens_BT, attention_BT, seen, image_id), labels_BT


class Warmup:
    """Trains a model on new drawings, one part after the other."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.processor = make_image_processor()
        self.rng = random.Random(_SEED)
        self._held_out = {drawing.picture for drawing in shapes_task.held_out_drawings()}

    def new_drawing(self) -> Drawing:
        """Return a random drawing whose picture is none of the held-out ones."""
        while True:
            drawing = shapes_task.random_drawing(self.rng)
            if drawing.picture not in self._held_out:
                return drawing

    def train(
        self, example_of: Callable[[Drawing, random.Random], Example], steps: int, learning_rate: float
    ) -> None:
        """Take steps on new drawings, at a rate that rises from 0 and at the end falls to 0."""
        model = self.model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=_BETAS, weight_decay=0.01)
        started = time.perf_counter()
        for number in range(1, steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * min(number / _RAMP_STEPS, 1.0, 4 * (steps + 1 - number) / steps)
            examples = [example_of(self.new_drawing(), self.rng) for _ in range(_BATCH)]
            seen = look(self.processor, [shapes_task.png(example.drawing) for example in examples])
            arguments, labels_BT = encode(self.tokenizer, examples, seen, model.config.image_token_id)
            logits_BTV = model(**arguments, use_cache=False).logits
            loss = F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=_IGNORED)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if number % 100 == 0:
                seconds = time.perf_counter() - started
                sys.stdout.write(f"step {number:4d}  loss {loss.item():.4f}  {seconds:.0f} s\n")
                sys.stdout.flush()
        model.eval()


@torch.no_grad()
def sample_accuracy(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, Any]],
    seed: int,
    *,
    greedy: bool = False,
) -> float:
    """Return the share of rows whose sampled completion, at temperature 1, is the answer in a sentence.

    With `greedy` the likeliest token is taken each time. The caller's global generator is left as it was.
    """
    processor = make_image_processor()
    choice = (
        {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    )
    right = 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for start in range(0, len(rows), 64):
            part = rows[start : start + 64]
            seen = look(processor, [row["images"][0]["bytes"] for row in part])
            asked = [row["messages"][0]["content"].removeprefix("<image>") for row in part]
            texts = [prompt(text, count) for text, count in zip(asked, seen.num_tokens, strict=True)]
            # The tokenizer pads on the left.
            encoded = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
            tokens_BT = encoded["input_ids"]
            arguments = inputs(tokens_BT, encoded["attention_mask"], seen, model.config.image_token_id)
            output_BT = model.generate(**arguments, max_new_tokens=_MAX_NEW_TOKENS, **choice)
            said = tokenizer.batch_decode(output_BT[:, tokens_BT.shape[1] :], skip_special_tokens=True)
            right += sum(
                text + IM_END == reply(row["solution"]) for text, row in zip(said, part, strict=True)
            )
    return right / len(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, measure and save the embedded model; return the exit status.

    Held-out drawings are sampled once, after the training, as a gate: a model outside the range is not saved.
    """
    out = out_folder(arguments, shapes_task.MODEL_DIR)
    torch.set_num_threads(_THREADS)
    torch.manual_seed(_SEED)
    tokenizer = make_shapes_tokenizer()
    model = make_random_model(tokenizer)
    write_sizes(model, tokenizer)
    warmup = Warmup(model, tokenizer)
    rows = shapes_task.held_out_rows()
    warmup.train(seeing_example, _SEEING_STEPS, _SEEING_RATE)
    sys.stdout.write(
        f"held out, greedy, seeing: {sample_accuracy(model, tokenizer, rows, _SEED, greedy=True):.3f}\n"
    )
    warmup.train(blurred_example, _BLURRING_STEPS, _BLURRING_RATE)
    accuracy = sample_accuracy(model, tokenizer, rows, _SEED)
    permuted = sample_accuracy(model, tokenizer, shapes_task.permuted_rows(), _SEED)
    sys.stdout.write(f"held out, one sample each at temperature 1: {accuracy:.3f}, permuted {permuted:.3f}\n")
    low, high = _ACCURACY_RANGE
    if not low <= accuracy <= high:
        sys.stderr.write(f"the accuracy on held-out drawings is not in {low}..{high}; nothing is saved\n")
        return 1
    make_image_processor().save_pretrained(out)
    save(model, tokenizer, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
