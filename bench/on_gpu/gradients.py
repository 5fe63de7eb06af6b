"""Part 2: every layout, kernel and way to keep activations against plain padded rows in float32."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from covey.models.layouts import AttentionKind
from covey.models.liger import use_liger, wants_liger
from covey.models.policy import Policy
from covey.plan.recompute import Recompute
from covey.selftest.bounds import BOUNDS
from covey.selftest.compare import Result, by_plain_logits, by_policy, relative
from covey.token_streams import Row, StreamKind, random_rows
from on_gpu.lines import Found, Lines
from on_gpu.machine import device

VOCABULARY = 512
# In float32 only the order of sums differs; in bfloat16 the limit follows from what padded rows lose.
FLOAT32_LIMITS = tuple(BOUNDS[f"head in blocks: {what}"].other for what in ("logprobs", "gradient"))
BFLOAT16_FACTOR = 2.0
MOST_LOST = (0.02, 0.1)
# Seconds that a case may take which compiles a kernel.
COMPILING_S = 12


def run(lines: Lines) -> None:
    """Write a line for every way to compute Qwen 3."""
    compare(lines, "qwen3", thorough=True)


def compare(lines: Lines, family: str, *, thorough: bool) -> None:
    """Write a line for every way: first those of float32, where nothing is compiled."""
    compared = Compared(family, small=lines.small)
    for dtype in (torch.float32, torch.bfloat16) if thorough else (torch.bfloat16,):
        for way in ways(dtype, thorough=thorough, has_liger=compared.has_liger):
            lines.case(
                f"{family} {_name(dtype)} {way}",
                lambda d=dtype, w=way: compared.finding(d, w),  # type: ignore[misc]
                needs_s=COMPILING_S if way.attention == "flex" else 1,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to compute rows; with `in_passes` each row is a forward pass that goes on from its prompt."""

    attention: AttentionKind
    stream: StreamKind
    recompute: Recompute = "none"
    in_passes: bool = False
    liger: bool = False

    def __str__(self) -> str:
        words = [self.attention, self.stream]
        words += [] if self.recompute == "none" else [self.recompute]
        words += ["passes"] if self.in_passes else []
        return " ".join([*words, *(["liger"] if self.liger else [])])


def ways(dtype: torch.dtype, *, thorough: bool, has_liger: bool) -> Iterator[Way]:
    """What a run may compute in; float32 only where nothing is compiled for it, which takes seconds each."""
    kinds: list[AttentionKind] = ["sdpa"]
    if device().type == "cuda" and dtype == torch.bfloat16:
        kinds.insert(0, "flex")
        if importlib.util.find_spec("flash_attn") is not None:
            kinds.append("flash_attn")
    best = kinds[0]
    yield Way(attention=best, stream="prefix")
    yield Way(attention=best, stream="prefix", in_passes=True)
    yield Way(attention=best, stream="packed")
    if thorough:
        yield Way(attention=best, stream="prefix", recompute="selective")
        yield Way(attention=best, stream="prefix", recompute="full")
    for kind in kinds[1:]:
        yield Way(attention=kind, stream="prefix")
    if thorough and dtype == torch.float32:
        yield Way(attention="eager", stream="prefix")
        yield Way(attention="eager", stream="packed")
    if dtype == torch.bfloat16 and has_liger:
        # Last, for it stays in the model.
        yield Way(attention=best, stream="prefix", liger=True)


class Compared:
    """One model: padded rows in float32 are exact, padded rows in bfloat16 say what that dtype loses."""

    def __init__(self, family: str, *, small: bool) -> None:
        # Float32 on a GPU means float32: tensor cores would round to 10 bits.
        torch.backends.cuda.matmul.allow_tf32 = False
        self.rows = _rows(small)
        self.policy = Policy(random_family(family), stream="padded")
        self.has_liger = wants_liger("auto", self.policy.model, device())
        self.exact = by_policy(self.policy, self.rows)
        plain = by_plain_logits(self.policy.model, self.rows)
        self.head = self._far(self.exact, plain)
        self._masters = [p.detach().clone() for p in self.policy.parameters()]
        self._lost: tuple[float, float] | None = None

    def finding(self, dtype: torch.dtype, way: Way) -> Found:
        """Relative errors of logprobs and of the gradient against padded rows in float32."""
        limits = self._limits(dtype)
        self._cast(dtype)
        self.policy.attention = way.attention
        self.policy.use_stream(way.stream)
        self.policy.keep_activations(way.recompute)
        if way.liger:
            use_liger(self.policy.model)
        value, gradient = self._far(by_policy(self.policy, self.rows, in_passes=way.in_passes), self.exact)
        self.policy.keep_activations("none")
        passed = value <= limits[0] and gradient <= limits[1]
        why = (
            ""
            if passed
            else f"the most allowed is {limits[0]:.1e} of logprobs, {limits[1]:.1e} of the gradient"
        )
        return Found(figures={"logprobs": value, "gradient": gradient}, passed=passed, why=why)

    def _limits(self, dtype: torch.dtype) -> tuple[float, float]:
        """In float32 only the order of sums differs; in bfloat16 twice of what padded rows lose."""
        if any(not x <= limit for x, limit in zip(self.head, FLOAT32_LIMITS, strict=True)):
            raise ArithmeticError(f"padded rows differ from the model's own logits by {self.head}")
        if dtype == torch.float32:
            return FLOAT32_LIMITS
        if self._lost is None:
            self._cast(dtype)
            self.policy.use_stream("padded")
            self._lost = self._far(by_policy(self.policy, self.rows), self.exact)
        if any(not x <= most for x, most in zip(self._lost, MOST_LOST, strict=True)):
            raise ArithmeticError(f"padded rows in {dtype} lose {self._lost}")
        return BFLOAT16_FACTOR * self._lost[0], BFLOAT16_FACTOR * self._lost[1]

    def _cast(self, dtype: torch.dtype) -> None:
        """The exact weights in another dtype, not what an earlier cast left of them; buffers stay exact."""
        for parameter, master in zip(self.policy.parameters(), self._masters, strict=True):
            parameter.data = master.to(dtype)

    @staticmethod
    def _far(got: Result, exact: Result) -> tuple[float, float]:
        return relative(got[0], exact[0]), relative(got[1], exact[1])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rows(small: bool) -> list[Row]:
    """Two families of siblings; longer than a block of flex attention where that is tried."""
    sizes = ((40, (30, 21, 1)), (11, (50, 9))) if small else ((300, (250, 140, 1)), (140, (400, 33)))
    return random_rows(sizes, VOCABULARY, seed=5)


def random_family(family: str) -> Any:
    """Two layers with heads wide enough for every kernel; windows are shorter than the rows."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 192,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
    }
    t = transformers
    config: Any = {
        "qwen3": lambda: t.Qwen3Config(**sizes),
        "mistral": lambda: t.MistralConfig(sliding_window=17, **sizes),
        "gemma2": lambda: t.Gemma2Config(sliding_window=17, query_pre_attn_scalar=32, **sizes),
        "gpt_oss": lambda: t.GptOssConfig(
            sliding_window=17, num_local_experts=4, num_experts_per_tok=2, **sizes
        ),
    }[family]()
    torch.manual_seed(1)
    model = t.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    # Sinks and biases are drawn too, so that none of them is a zero that hides a mistake.
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return model.to(device())
