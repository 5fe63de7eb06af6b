"""Part 1: every layout, kernel and way to keep activations against plain padded rows in float32."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from covey.models.layouts import AttentionKind, StreamKind
from covey.models.policy import Policy
from covey.models.stream import Row
from covey.plan.recompute import Recompute
from covey.selftest.compare import Result, by_plain_logits, by_policy, relative
from on_gpu.machine import device, say

VOCABULARY = 512
# In float32 only the order of sums differs; in bfloat16 the limit follows from what padded rows lose.
FLOAT32_LIMITS = (2e-5, 2e-5)
BFLOAT16_FACTOR = 1.5


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Relative errors of one way to compute, and the limits that they are held to."""

    family: str
    dtype: torch.dtype
    way: str
    value: float
    gradient: float
    limits: tuple[float, float]

    @property
    def passed(self) -> bool:
        """Whether both are within their limits; what is not a number is not."""
        return self.value <= self.limits[0] and self.gradient <= self.limits[1]

    def line(self) -> str:
        """One line of the table."""
        name = str(self.dtype).removeprefix("torch.")
        verdict = "ok" if self.passed else "FAILED (limits {:.1e}, {:.1e})".format(*self.limits)
        return f"{self.family:<8} {name:<9} {self.way:<28} {self.value:9.1e} {self.gradient:9.1e}  {verdict}"


def correctness(small: bool) -> list[Finding]:
    """Print the table and return what it holds."""
    say("correctness: relative error against padded rows in float32, of logprobs and of the gradient")
    if device().type != "cuda":
        say("(on a CPU without flex and flash_attn, whose kernels train on GPUs alone)")
    findings = []
    for family in ("qwen3", "mistral", "gemma2", "gpt_oss"):
        for finding in family_findings(family, small):
            say(finding.line())
            findings.append(finding)
    return findings


def family_findings(family: str, small: bool) -> Iterator[Finding]:
    """Every way to compute one family, in float32 and bfloat16."""
    # Float32 on a GPU means float32: tensor cores would round to 10 bits.
    torch.backends.cuda.matmul.allow_tf32 = False
    model = _model(family)
    rows = _rows(small)
    policy = Policy(model, stream="padded")
    exact = by_policy(policy, rows)
    yield _finding(family, torch.float32, "chunked head", by_plain_logits(model, rows), exact, FLOAT32_LIMITS)
    for dtype in (torch.float32, torch.bfloat16):
        policy.to(dtype).use_stream("padded")
        limits = FLOAT32_LIMITS
        if dtype != torch.float32:
            lost = _finding(family, dtype, "padded", by_policy(policy, rows), exact, (0.02, 0.1))
            limits = (BFLOAT16_FACTOR * lost.value, BFLOAT16_FACTOR * lost.gradient)
            yield lost
        for attention, stream, recompute in _ways():
            policy.attention = attention
            policy.use_stream(stream)
            policy.keep_activations(recompute)
            again = "" if recompute == "none" else f", {recompute}"
            way = f"{stream}, {attention}{again}"
            yield _finding(family, dtype, way, by_policy(policy, rows), exact, limits)
            if stream == "prefix":
                in_passes = by_policy(policy, rows, in_passes=True)
                yield _finding(family, dtype, f"{way}, passes", in_passes, exact, limits)
        policy.keep_activations("none")


def _ways() -> list[tuple[AttentionKind, StreamKind, Recompute]]:
    kinds: list[AttentionKind] = ["sdpa", "eager"]
    if device().type == "cuda":
        kinds.append("flex")
        if importlib.util.find_spec("flash_attn") is not None:
            kinds.append("flash_attn")
    streams: list[StreamKind] = ["prefix", "packed"]
    ways: list[tuple[AttentionKind, StreamKind, Recompute]] = [
        (kind, stream, "none") for kind in kinds for stream in streams
    ]
    recomputed: list[Recompute] = ["selective", "full"]
    return ways + [(kind, "prefix", r) for kind in kinds if kind != "eager" for r in recomputed]


def _finding(
    family: str, dtype: torch.dtype, way: str, got: Result, exact: Result, limits: tuple[float, float]
) -> Finding:
    value, gradient = (relative(a, b) for a, b in zip(got, exact, strict=True))
    return Finding(family=family, dtype=dtype, way=way, value=value, gradient=gradient, limits=limits)


def _rows(small: bool) -> list[Row]:
    """Two families of siblings; longer than a block of flex attention where that is tried."""
    sizes = ((40, (30, 21, 1)), (11, (50, 9))) if small else ((300, (250, 140, 1)), (90, (400, 33)))
    generator = torch.Generator().manual_seed(5)
    rows = []
    for key, (prompt, lengths) in enumerate(sizes):
        shared = torch.randint(VOCABULARY, (prompt,), generator=generator).tolist()
        for length in lengths:
            own = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
            trained = [False] * prompt + [True] * length
            rows.append(Row(token_ids=shared + own, is_trained=trained, prompt_length=prompt, prompt_key=key))
    return rows


def _model(family: str) -> Any:
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
