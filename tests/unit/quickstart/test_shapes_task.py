"""The embedded task for images and its model: drawings that show what their answers say, no leak of held-out
ones, files that agree with each other, and answers that need the picture and leave room to learn."""

from __future__ import annotations

import io
import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

from covey.quickstart import shapes_task as task

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

import make_shapes_model as make

SIZE_LIMIT = 2_000_000
HELD_OUT_START = task.Drawing(
    canvas=(32, 32),
    shapes=(
        task.Shape(kind="triangle", colour="blue", left=14, top=3, size=7),
        task.Shape(kind="square", colour="yellow", left=2, top=12, size=9),
        task.Shape(kind="triangle", colour="blue", left=12, top=11, size=8),
        task.Shape(kind="triangle", colour="blue", left=23, top=21, size=8),
    ),
    question="How many shapes are there?",
    answer="4",
)
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(task.MODEL_DIR)


@pytest.fixture(scope="module")
def model():
    return AutoModelForImageTextToText.from_pretrained(task.MODEL_DIR).eval()


def opened(png: bytes) -> Image.Image:
    return Image.open(io.BytesIO(png))


def answer_of(drawing: task.Drawing) -> str:
    """What a drawing shows, read from its shapes."""
    many, colour = (
        re.fullmatch(pattern, drawing.question)
        for pattern in (r"How many (\w+)s are there\?", r"Which colour is the (\w+)\?")
    )
    if many is not None:
        return str(sum(many[1] in (shape.kind, "shape") for shape in drawing.shapes))
    (found,) = [shape.colour for shape in drawing.shapes if shape.kind == colour[1]]
    return found


def test_the_task_imports_no_heavy_package():
    heavy = "{'torch', 'transformers', 'numpy', 'PIL'}"
    code = f"import sys, covey.quickstart.shapes_task; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_held_out_and_training_pictures_are_all_different():
    drawings = task.held_out_drawings() + task.training_drawings()
    assert len(drawings) == task.HELD_OUT + task.TRAINING == 512 + 4096
    pixels = {(drawing.canvas, opened(task.png(drawing)).tobytes()) for drawing in drawings}
    assert len({drawing.picture for drawing in drawings}) == len(pixels) == len(drawings)


def test_the_split_is_the_one_the_model_was_made_with():
    # Another split would leak held-out drawings into the weights without any other test noticing.
    assert task.held_out_drawings()[0] == HELD_OUT_START


def test_each_answer_is_what_the_drawing_shows():
    drawings = task.held_out_drawings() + task.training_drawings()
    assert [drawing.answer for drawing in drawings] == [answer_of(drawing) for drawing in drawings]
    assert all(drawing.answer in task.answers_to(drawing.question) for drawing in drawings)
    assert {drawing.canvas for drawing in drawings} == {(32, 32), (40, 32)}


def test_pictures_show_the_shapes_alone_and_none_over_another():
    for drawing in task.held_out_drawings():
        image = opened(task.png(drawing))
        assert (image.size, image.mode) == (drawing.canvas, "RGB")
        for shape in drawing.shapes:
            box = (shape.left, shape.top, shape.left + shape.size, shape.top + shape.size)
            part = image.crop(box)
            colours = {colour: count for count, colour in part.getcolors()}
            filled = colours.pop(task.COLOURS[shape.colour])
            assert part.getbbox() == (0, 0, shape.size, shape.size)
            assert set(colours) <= {(0, 0, 0)}
            share = filled / shape.size**2
            low, high = {"circle": (0.7, 0.9), "square": (1.0, 1.0), "triangle": (0.4, 0.6)}[shape.kind]
            assert low <= share <= high
            image.paste((0, 0, 0), box)
        assert image.getbbox() is None


def test_rows_have_an_image_before_the_question():
    for rows, drawings in (
        (task.training_rows(), task.training_drawings()),
        (task.held_out_rows(), task.held_out_drawings()),
    ):
        assert rows == [
            {
                "messages": [{"role": "user", "content": f"<image>{drawing.question}"}],
                "images": [{"bytes": task.png(drawing)}],
                "solution": drawing.answer,
            }
            for drawing in drawings
        ]


def test_without_the_picture_a_guess_is_right_at_most_three_times_in_ten():
    best = defaultdict(Counter)
    for drawing in task.training_drawings():
        best[drawing.question][drawing.answer] += 1
    guesses = {question: counts.most_common(1)[0][0] for question, counts in best.items()}
    right = sum(guesses[drawing.question] == drawing.answer for drawing in task.held_out_drawings())
    assert 0.2 <= right / task.HELD_OUT <= 0.3
    assert all(len(counts) == 4 for counts in best.values())
    assert len(best) == 7


def test_permuted_rows_have_the_pictures_of_others_that_ask_the_same():
    rows, permuted = task.held_out_rows(), task.permuted_rows()
    assert [(row["messages"], row["solution"]) for row in rows] == [
        (row["messages"], row["solution"]) for row in permuted
    ]
    asked = defaultdict(set)
    for row in rows:
        asked[row["messages"][0]["content"]].add(row["images"][0]["bytes"])
    assert sum(map(len, asked.values())) == len({row["images"][0]["bytes"] for row in permuted}) == len(rows)
    solutions = {row["images"][0]["bytes"]: row["solution"] for row in rows}
    for row, other in zip(rows, permuted, strict=True):
        assert other["images"] != row["images"]
        assert other["images"][0]["bytes"] in asked[row["messages"][0]["content"]]
    # Whoever reads the other picture without fault is right by chance alone.
    right = sum(solutions[row["images"][0]["bytes"]] == row["solution"] for row in permuted)
    assert 0.2 <= right / len(rows) <= 0.3


def test_the_model_directory_is_small_and_holds_no_local_path():
    files = sorted(path for path in task.MODEL_DIR.iterdir() if path.is_file())
    assert {path.name for path in files} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in files) <= SIZE_LIMIT
    for path in files:
        assert not re.search(rb"/(home|root|tmp|work|Users)/|_name_or_path", path.read_bytes()), path.name


def test_the_stored_tokenizer_and_image_processor_are_those_the_script_makes(tokenizer):
    made = make.make_shapes_tokenizer()
    assert made.get_vocab() == tokenizer.get_vocab()
    assert made.chat_template == tokenizer.chat_template
    stored = AutoImageProcessor.from_pretrained(task.MODEL_DIR, backend="pil")
    assert type(stored) is Qwen2VLImageProcessorPil
    assert stored.to_dict() == make.make_image_processor().to_dict()


def test_config_and_tokenizer_agree_on_ids(model, tokenizer):
    assert type(model) is Qwen2_5_VLForConditionalGeneration
    config = model.config
    ids = {
        make.IMAGE: config.image_token_id,
        make.VIDEO: config.video_token_id,
        make.VISION_START: config.vision_start_token_id,
        make.VISION_END: config.vision_end_token_id,
    }
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in ids} == ids
    assert tokenizer.decode(list(ids.values()), skip_special_tokens=True) == ""
    assert len(tokenizer) <= config.text_config.vocab_size == make.VOCABULARY
    for own in (config.text_config, model.generation_config):
        assert own.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert own.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    vision = config.vision_config
    # One block looks within windows, one at the whole picture, of which a window is a part.
    assert (vision.depth, list(vision.fullatt_block_indexes)) == (2, [1])
    assert vision.window_size < min(min(canvas) for canvas in task.CANVASES)


@pytest.mark.parametrize(
    ("canvas", "grid", "num_tokens"), [((32, 32), [1, 8, 8], 16), ((40, 32), [1, 8, 10], 20)]
)
def test_each_canvas_has_its_own_grid(canvas, grid, num_tokens):
    drawing = next(drawing for drawing in task.held_out_drawings() if drawing.canvas == canvas)
    seen = make.look(make.make_image_processor(), [task.png(drawing)])
    assert seen.grid_B3.tolist() == [grid]
    assert seen.num_tokens == [num_tokens]
    assert seen.pixels_ND.shape == (num_tokens * 4, 3 * 2 * 4 * 4)
    # No picture of the task is resized: no pixel is between two colours.
    values = {value for colour in task.COLOURS.values() for value in colour} | {0}
    assert set(((seen.pixels_ND + 1) * 127.5).round().unique().tolist()) <= values


def test_the_template_writes_blocks_and_text(tokenizer):
    def written(content, **options):
        message = {"role": "user", "content": content}
        return tokenizer.apply_chat_template([message], tokenize=False, **options)

    image, text = {"type": "image"}, {"type": "text", "text": "How many?"}
    assert written("How many?") == "<|im_start|>user\nHow many?<|im_end|>\n"
    assert written([text]) == written("How many?")
    assert written([image, text]) == f"<|im_start|>user\n{PICTURE}How many?<|im_end|>\n"
    assert written([image, text, image]) == f"<|im_start|>user\n{PICTURE}How many?{PICTURE}<|im_end|>\n"
    url = {"type": "image_url", "image_url": {"url": "a.png"}}
    assert written([url, text]) == written([{"type": "image", "image": "a.png"}, text])
    assert written([{"type": "video"}]) == written([image]).replace("image_pad", "video_pad")
    opened = written([image, text], add_generation_prompt=True)
    assert opened == make.prompt("How many?", 1)
    answered = [
        {"role": "user", "content": [image, text]},
        {"role": "assistant", "content": [{"type": "text", "text": "The answer is 3."}]},
    ]
    whole = tokenizer.apply_chat_template(answered, tokenize=False)
    assert whole == opened + make.reply("3") + "\n"


def test_each_word_of_the_task_is_one_token(tokenizer):
    def tokens(text):
        return [tokenizer.decode([i]) for i in tokenizer.encode(text, add_special_tokens=False)]

    assert tokens(make.reply("3")) == ["The", " answer", " is", " ", "3", ".", "<|im_end|>"]
    for colour in task.COLOURS:
        assert tokens(make.reply(colour)) == ["The", " answer", " is", f" {colour}", ".", "<|im_end|>"]
    for question in {drawing.question for drawing in task.held_out_drawings()}:
        assert tokens(question) == re.findall(r" ?\w+|\?", question)
    start, end = tokens(make.prompt("?", 2)), ["user", "\n", make.VISION_START, make.IMAGE, make.IMAGE]
    assert start[1:6] == end


def test_examples_of_the_warm_up_describe_or_answer():
    rng = random.Random(0)
    drawing = next(drawing for drawing in task.training_drawings() if len(drawing.shapes) == 2)
    first, second = drawing.shapes
    said = {make.seeing_example(drawing, rng) for _ in range(100)}
    described = f" {first.colour} {first.kind}, {second.colour} {second.kind}.<|im_end|>"
    assert said == {
        make.Example(drawing, drawing.question, make.reply(drawing.answer)),
        make.Example(drawing, "What is drawn?", described),
    }
    blurred = Counter(make.blurred_example(drawing, rng).said for _ in range(2000))
    assert set(blurred) == {make.reply(answer) for answer in task.answers_to(drawing.question)}
    right = blurred.pop(make.reply(drawing.answer))
    assert 0.45 <= right / 2000 <= 0.55
    assert max(blurred.values()) <= 1.3 * min(blurred.values())


def test_the_warm_up_draws_no_held_out_picture(monkeypatch, model, tokenizer):
    held_out, other = task.held_out_drawings()[0], task.training_drawings()[0]
    drawn = iter([held_out, other])
    warmup = make.Warmup(model, tokenizer)
    monkeypatch.setattr(task, "random_drawing", lambda rng: next(drawn))
    assert warmup.new_drawing() == other


def test_only_what_is_said_has_labels_and_the_loss_reaches_the_vision_tower(tokenizer):
    torch.manual_seed(0)
    model = make.make_random_model(tokenizer)
    by_canvas = {drawing.canvas: drawing for drawing in task.training_drawings()}
    examples = [make.Example(drawing, drawing.question, make.reply("3")) for drawing in by_canvas.values()]
    seen = make.look(make.make_image_processor(), [task.png(example.drawing) for example in examples])
    arguments, labels_BT = make.encode(tokenizer, examples, seen, model.config.image_token_id)
    said = tokenizer.encode(make.reply("3"), add_special_tokens=False)
    for tokens, labels, attention in zip(
        arguments["input_ids"], labels_BT, arguments["attention_mask"], strict=True
    ):
        num_tokens = int(attention.sum())
        assert labels[labels != -100].tolist() == said
        assert labels[num_tokens - len(said) - 1 : num_tokens - 1].tolist() == said
        assert tokens[num_tokens - len(said) : num_tokens].tolist() == said
    assert arguments["mm_token_type_ids"].sum(1).tolist() == seen.num_tokens
    logits_BTV = model(**arguments, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten()).backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.model.visual.parameters())


def test_sampled_accuracy_leaves_room_to_learn(model, tokenizer):
    assert 0.35 <= make.sample_accuracy(model, tokenizer, task.held_out_rows(), seed=0) <= 0.5


def test_with_other_pictures_the_answers_are_right_by_chance(model, tokenizer):
    assert make.sample_accuracy(model, tokenizer, task.permuted_rows(), seed=0) <= 0.3
    # What the model deems likeliest is right more often than what it samples, and as seldom by chance.
    greedy = make.sample_accuracy(model, tokenizer, task.held_out_rows(), seed=0, greedy=True)
    assert greedy >= 0.55
    assert make.sample_accuracy(model, tokenizer, task.permuted_rows(), seed=0, greedy=True) <= 0.3
