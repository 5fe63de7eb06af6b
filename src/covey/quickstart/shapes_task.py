"""Questions about drawn shapes: the embedded task that needs eyes, in training and held-out drawings.

The module is pure Python, so that reading the task costs no import of torch or transformers. Pillow is
imported where the first picture is drawn.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

MODEL_DIR: Path = Path(__file__).resolve().parent / "shapes_model"
"""The folder of the embedded model that sees, of its tokenizer and of its image processor's options."""

TRAINING = 4096
"""Counts the drawings to train on."""

HELD_OUT = 512
"""Counts the drawings that serve evaluation only."""

KINDS = ("circle", "square", "triangle")
COLOURS = {"red": (255, 48, 48), "green": (48, 208, 64), "blue": (64, 96, 255), "yellow": (255, 224, 32)}
COUNTS = (1, 2, 3, 4)
CANVASES = ((32, 32), (40, 32))
"""Lists the sizes of drawings as width and height in pixels."""

_BACKGROUND = (0, 0, 0)
_CELL = 10
_SIZES = (7, 8, 9)
_MOST_OTHERS = 2
_SPLIT_SEED = 20_291


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape that fills a square of `size` x `size` pixels; (`left`, `top`) is its upper left corner."""

    kind: str
    colour: str
    left: int
    top: int
    size: int


@dataclass(frozen=True, slots=True)
class Drawing:
    """A drawing with a question: shapes on a canvas of (width, height) pixels, a question and its answer."""

    canvas: tuple[int, int]
    shapes: tuple[Shape, ...]
    question: str
    answer: str

    @property
    def picture(self) -> tuple[tuple[int, int], tuple[Shape, ...]]:
        """Return all that is seen of it."""
        return self.canvas, self.shapes


def answers_to(question: str) -> list[str]:
    """Return the four answers that a question may have."""
    return [str(count) for count in COUNTS] if question.startswith("How many") else list(COLOURS)


def _placed(
    contents: list[tuple[str, str]], canvas: tuple[int, int], rng: random.Random
) -> tuple[Shape, ...]:
    """Return shapes of these kinds and colours at random places, none over another, row by row."""
    # One shape a cell, with pixels to spare on each side. What the cells leave of the canvas is shared out.
    left, top = (length % _CELL // 2 for length in canvas)
    cells = [(row, column) for row in range(canvas[1] // _CELL) for column in range(canvas[0] // _CELL)]
    shapes = {}
    for (row, column), (kind, colour) in zip(rng.sample(cells, len(contents)), contents, strict=True):
        size = rng.choice(_SIZES)
        spare = _CELL - size
        x, y = (start + rng.randint(0, spare) for start in (left + column * _CELL, top + row * _CELL))
        shapes[row, column] = Shape(kind, colour, x, y, size)
    return tuple(shapes[cell] for cell in sorted(shapes))


def _contents(kinds: list[str], rng: random.Random) -> list[tuple[str, str]]:
    return [(kind, rng.choice(list(COLOURS))) for kind in kinds]


def random_drawing(rng: random.Random) -> Drawing:
    """Return a random drawing. Whatever the question is, each of its four answers is as likely."""
    subject = rng.choice((*KINDS, "shape"))
    others = [kind for kind in KINDS if kind != subject]
    beside = [] if subject == "shape" else rng.choices(others, k=rng.randint(0, _MOST_OTHERS))
    if subject != "shape" and rng.random() < 0.5:
        contents = _contents([subject, *beside], rng)
        question, answer = f"Which colour is the {subject}?", contents[0][1]
    else:
        count = rng.choice(COUNTS)
        kinds = rng.choices(KINDS, k=count) if subject == "shape" else [subject] * count
        contents = _contents([*kinds, *beside], rng)
        question, answer = f"How many {subject}s are there?", str(count)
    canvas = rng.choice(CANVASES)
    return Drawing(canvas, _placed(contents, canvas, rng), question, answer)


def _split() -> tuple[tuple[Drawing, ...], tuple[Drawing, ...]]:
    """Return the held-out and the training drawings, no two of which show the same."""
    rng = random.Random(_SPLIT_SEED)
    by_picture: dict[Any, Drawing] = {}
    while len(by_picture) < HELD_OUT + TRAINING:
        drawing = random_drawing(rng)
        by_picture.setdefault(drawing.picture, drawing)
    drawings = tuple(by_picture.values())
    return drawings[:HELD_OUT], drawings[HELD_OUT:]


def held_out_drawings() -> list[Drawing]:
    """Return the fixed `HELD_OUT` drawings that serve evaluation only."""
    return list(_split()[0])


def training_drawings() -> list[Drawing]:
    """Return the fixed `TRAINING` drawings."""
    return list(_split()[1])


def png(drawing: Drawing) -> bytes:
    """Return the picture as the bytes of a PNG file."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", drawing.canvas, _BACKGROUND)
    pen = ImageDraw.Draw(image)
    for shape in drawing.shapes:
        _fill(pen, shape)
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _fill(pen: ImageDraw, shape: Shape) -> None:
    colour = COLOURS[shape.colour]
    left, top = shape.left, shape.top
    right, bottom = left + shape.size - 1, top + shape.size - 1
    match shape.kind:
        case "circle":
            pen.ellipse((left, top, right, bottom), fill=colour)
        case "square":
            pen.rectangle((left, top, right, bottom), fill=colour)
        case _:
            pen.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], fill=colour)


def _row(drawing: Drawing, picture: Drawing) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": f"<image>{drawing.question}"}],
        "images": [{"bytes": png(picture)}],
        "solution": drawing.answer,
    }


def training_rows() -> list[dict[str, Any]]:
    """Return one row of `messages`, `images` and `solution` per training drawing."""
    return [_row(drawing, drawing) for drawing in training_drawings()]


def held_out_rows() -> list[dict[str, Any]]:
    """Return one row of `messages`, `images` and `solution` per held-out drawing."""
    return [_row(drawing, drawing) for drawing in held_out_drawings()]


def permuted_rows() -> list[dict[str, Any]]:
    """Return the held-out rows, each with the picture of another row that asks the same question.

    Every question still fits its picture, but the answer belongs to another one: whoever looks is right no
    more often than by chance.
    """
    drawings = held_out_drawings()
    by_question: dict[str, list[Drawing]] = {}
    for drawing in drawings:
        by_question.setdefault(drawing.question, []).append(drawing)
    last = {question: alike[-1] for question, alike in by_question.items()}
    rows = []
    for drawing in drawings:
        rows.append(_row(drawing, last[drawing.question]))
        last[drawing.question] = drawing
    return rows
