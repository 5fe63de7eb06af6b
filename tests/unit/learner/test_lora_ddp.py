"""Two gloo processes against one, with an adapter: the same gradients and weights, in mixed dtypes too.

Every row is a micro-batch of its own on both sides, so that in bfloat16 too the gradients differ by the order
of float32 sums alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from covey.algorithm.losses import LossOutput
from covey.learner.backends.ddp import DDPBackend
from covey.learner.backends.single import SingleBackend
from covey.models.adapter_shapes import LoraSettings
from covey.models.load import load_adapted
from covey.models.probe import micro_of
from covey.selftest.compare import relative
from covey.token_streams import Row
from support.models import save_model
from support.options import learner
from support.processes import run_in_processes

OPTIMIZER = learner(weight_decay=0.1)
CASES = {
    "lora-float32": ({}, "float32"),
    "lora-bfloat16": ({}, "bfloat16"),
    "whole-bfloat16": ({"modules_to_save": ("lm_head", "norm")}, "bfloat16"),
    "dora-bfloat16": ({"use_dora": True}, "bfloat16"),
}
# From the third step on one of DoRA's norms may round to the other of two bfloat16 numbers.
STEPS = {case: 2 if "dora" in case else 3 for case in CASES}


def rows() -> list[Row]:
    generator = torch.Generator().manual_seed(4)
    made = []
    for number, length in enumerate((9, 14, 21, 6)):
        tokens = torch.randint(300, (length,), generator=generator).tolist()
        trained = [False] * 4 + [True] * (length - 4)
        made.append(Row(token_ids=tokens, is_trained=trained, prompt_length=4, prompt_key=number))
    return made


def loss(stats, micro):
    weights = torch.linspace(-1, 2, len(stats.logprob_N))
    return LossOutput(loss=(stats.logprob_N * weights).sum(), sums={})


def train(base: Path, case: str, rank: int, world: int) -> dict[str, torch.Tensor]:
    """Some steps over the rows; gradients of each, weights after them, and the reference's logprobs."""
    changes, name = CASES[case]
    dtype = getattr(torch, name)
    policy = load_adapted(
        base,
        LoraSettings(rank=4, alpha=8, **changes),
        adapter=None,
        # Ranks that drew another adapter would not agree.
        seed=0,
        compute_dtype=dtype,
        device=torch.device("cpu"),
        disable_dropout=True,
    )
    policy.use_stream("prefix")
    backend = (DDPBackend if world > 1 else SingleBackend)(policy, OPTIMIZER, compute_dtype=dtype)
    micros = [micro_of([row], "prefix", policy.device) for row in rows()[rank::world]]
    out: dict[str, torch.Tensor] = {}
    for step in range(STEPS[case]):
        out[f"reference/{step}"] = backend.annotate(micros[:1], "reference", lambda: None)
        for i, micro in enumerate(micros):
            backend.backward(micro, loss, last=i == len(micros) - 1)
        out |= {f"gradient{step}/{n}": g for n, g in backend.masters.gradients().items()}
        backend.step(1e-2)
    masters = zip(backend.masters.names, backend.masters.masters, strict=True)
    out |= {f"after/{n}": m.detach().clone() for n, m in masters}
    backend.close()
    return out


def part(tensors, prefix):
    """All tensors of a kind, end to end."""
    return torch.cat([tensors[n].flatten().double() for n in sorted(tensors) if n.startswith(prefix)])


@pytest.mark.multi
def test_two_processes_are_as_one(tmp_path):
    base = save_model("llama", tmp_path / "base")
    run_in_processes(__file__, base, tmp_path)
    for case in CASES:
        expected = train(base, case, 0, 1)
        actual, other = [load_file(tmp_path / f"{case}-{rank}.safetensors") for rank in range(2)]
        assert torch.equal(part(actual, "after/"), part(other, "after/"))
        first = part(expected, "gradient0/")
        assert relative(part(actual, "gradient0/"), first) < 1e-6
        assert relative(2 * part(actual, "gradient0/"), first) > 0.5
        for step in range(STEPS[case]):
            assert relative(part(actual, f"gradient{step}/"), part(expected, f"gradient{step}/")) < 1e-3
            # The base stays the reference, whatever has been learnt.
            assert torch.equal(actual[f"reference/{step}"], expected[f"reference/{step}"])
        assert relative(part(actual, "after/"), part(expected, "after/")) < 1e-4


def _main(base: Path, work: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for case in CASES:
        tensors = train(base, case, rank, dist.get_world_size())
        path = work / f"{case}-{rank}.safetensors"
        save_file({n: t.contiguous().clone() for n, t in tensors.items()}, str(path))
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
