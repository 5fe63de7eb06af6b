"""DeepSpeed's stages in two processes: a gradient that is not finite leaves nothing behind, and a reference
that follows the policy is that of one process."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from covey.algorithm.losses import LossOutput
from covey.learner.backends.deepspeed import ZeroEngine, partition
from covey.learner.backends.single import SingleBackend
from covey.learner.backends.zero import Zero2Backend, Zero3Backend, whole_engine
from covey.learner.optimizer import NonFiniteGradient, OptimizerConfig
from covey.learner.reference import MovingReference
from covey.learner.sharding.build import hollow_policy, rows_of_source
from covey.learner.sharding.partitions import Partitioned, PartitionedReference
from covey.models.load import load_policy, read_policy
from covey.models.policy import Policy
from covey.models.probe import micro_of
from covey.token_streams import Row
from support.models import save_model
from support.processes import run_in_processes

CPU = torch.device("cpu")
OPTIMIZER = OptimizerConfig(betas=(0.9, 0.999), epsilon=1e-3, weight_decay=0.1, max_grad_norm=0.5)
STAGES = {"zero2": (2, ()), "zero2_offload": (2, ("optimizer",)), "zero3": (3, ())}
STAGES["zero3_offload"] = (3, ("optimizer", "param"))


def settings(name: str) -> dict[str, Any]:
    """What the engine of a preset is configured with."""
    stage, offloaded = STAGES[name]
    offloads = {f"offload_{what}": {"device": "cpu"} for what in offloaded}
    zero = {"stage": stage, "overlap_comm": False, "stage3_param_persistence_threshold": 100, **offloads}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "zero_optimization": zero,
    }


def whole(base: Path) -> Policy:
    """The policy of a directory, in float32."""
    policy = load_policy(base, device=CPU, disable_dropout=True, gradient_checkpointing=False)
    policy.use_stream("padded")
    return policy


def made(base: Path, name: str, dtype: torch.dtype, *, follows: bool = False) -> Any:
    """The backend of a preset; `single` is one process."""
    pace = {"every": 1, "alpha": 0.5}
    if name == "zero3" or name == "zero3_offload":
        hollow = hollow_policy(base, None, adapter=None, seed=0, dtype=dtype, trust_remote_code=False)
        sampler = hollow_policy(base, None, adapter=None, seed=0, dtype=dtype, trust_remote_code=False)
        hollow.policy.runs_on = sampler.policy.runs_on = CPU
        with rows_of_source(hollow, base, trust_remote_code=False) as read:
            partition(hollow.policy, settings(name), read, dtype)
            own = Partitioned(ZeroEngine(hollow.policy, settings(name), OPTIMIZER))
            own.fill_masters(read)
        moving = PartitionedReference(own, **pace) if follows else None
        return Zero3Backend(own, sampler.policy, OPTIMIZER, compute_dtype=dtype, moving=moving)
    policy = whole(base)
    reference = whole(base).requires_grad_(False).eval() if follows else None
    moving = MovingReference(policy, reference, **pace, dtype=dtype) if follows else None
    if name == "single":
        return SingleBackend(policy, OPTIMIZER, compute_dtype=dtype, reference=reference, moving=moving)
    engine = whole_engine(policy, settings(name), OPTIMIZER, dtype)
    return Zero2Backend(engine, OPTIMIZER, reference=reference, moving=moving)


def rows(step: int) -> list[Row]:
    generator = torch.Generator().manual_seed(step)
    made = []
    for number, length in enumerate((9, 14, 21, 6, 12, 8)):
        tokens = torch.randint(300, (length,), generator=generator).tolist()
        trained = [False] * 4 + [True] * (length - 4)
        made.append(Row(token_ids=tokens, is_trained=trained, prompt_length=4, prompt_key=number))
    return made


def take_step(backend: Any, step: int, *, spoiled: bool = False) -> None:
    """A step over the rows of this rank, each a micro-batch; a spoiled one has a loss of NaN on the first."""
    factors = [math.nan if spoiled and backend.dp_rank == 0 and i == 2 else 1.0 for i in range(6)]
    own = list(zip(rows(step), factors, strict=True))[backend.dp_rank :: backend.dp_world]
    for number, (row, factor) in enumerate(own, start=1):

        def loss(stats: Any, micro: Any, factor: float = factor) -> LossOutput:
            weights = torch.linspace(-1, 2, len(stats.logprob_N))
            return LossOutput(loss=factor * (stats.logprob_N * weights).sum(), sums={})

        backend.backward(micro_of([row], "padded", CPU), loss, last=number == len(own))
    backend.step(1e-2)


def state(backend: Any) -> dict[str, Tensor]:
    """Everything that a step may change, of this rank."""
    masters = {f"master/{n}": m.detach().clone() for n, m in backend.engine.masters.items()}
    moments = {k: t.clone() for k, t in backend.masters.state().items()}
    weights = {f"weight/{n}": w.clone() for n, w in backend.weights()}
    return {**masters, **moments, **weights}


def assert_equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def a_spoiled_step_is_as_none(base: Path, name: str, dtype: torch.dtype) -> None:
    """Weights, masters, moments and step counts stay, and the next step has the same bits."""
    undisturbed, disturbed = made(base, name, dtype), made(base, name, dtype)
    for backend in (undisturbed, disturbed):
        take_step(backend, 1)
    before = state(disturbed)
    with pytest.raises(NonFiniteGradient):
        take_step(disturbed, 2, spoiled=True)
    assert_equal(state(disturbed), before)
    for backend in (undisturbed, disturbed):
        take_step(backend, 3)
    after = state(disturbed)
    assert_equal(after, state(undisturbed))
    assert any(not torch.equal(after[n], before[n]) for n in after if n.startswith("weight/"))
    assert {float(t) for n, t in after.items() if n.startswith("step/")} == {2.0}
    undisturbed.close()
    disturbed.close()


def followed(base: Path, name: str) -> dict[str, Tensor]:
    """The reference of a backend, and its logprobs, after two steps that it has followed."""
    backend = made(base, name, torch.float32, follows=True)
    for step in (1, 2):
        take_step(backend, step)
        assert backend.move_reference(step)
    micros = [micro_of([row], "padded", CPU) for row in rows(3)[:2]]
    found = {
        which: backend.annotate(micros, which, lambda: None)  # type: ignore[arg-type]
        for which in ("reference", "old")
    }
    tensors = {p.name: p.tensor.clone() for p in backend.moving.pieces(0, 1)}
    backend.close()
    return {**found, **{f"piece/{n}": t for n, t in tensors.items()}}


@pytest.mark.multi
def test_stages_in_two_processes(tmp_path: Path) -> None:
    base = save_model("qwen2", tmp_path / "base", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    run_in_processes(__file__, base, tmp_path)
    expected = followed(base, "single")
    pieces = {n for n in expected if n.startswith("piece/")}
    for name in ("zero2", "zero3"):
        found = [load_file(str(tmp_path / f"{name}-{rank}.safetensors")) for rank in range(2)]
        together = {**found[0], **found[1]}
        assert {n for n in together if n.startswith("piece/")} == pieces
        for key, tensor in expected.items():
            assert torch.allclose(together[key], tensor, atol=2e-6), (name, key)
        assert not torch.allclose(together["reference"], together["old"], atol=1e-4)


@pytest.mark.multi
def test_parts_that_have_lost_digits_have_masters_that_have_not(tmp_path: Path) -> None:
    """Of a model that is saved in float32, in bfloat16."""
    base = save_model("llama", tmp_path / "base")
    run_in_processes(__file__, base, tmp_path, "masters", processes=1)
    expected = {f"model.{n}": p for n, p in read_policy(base, False).model.named_parameters()}
    for name in ("zero2", "zero3"):
        assert_equal(load_file(str(tmp_path / f"{name}.safetensors")), dict(expected))


def _main(base: Path, work: Path, what: str = "") -> None:
    torch.set_num_threads(1)
    if what:
        for name in ("zero2", "zero3"):
            backend = made(base, name, torch.bfloat16)
            own = {n: m.view(backend.engine.shape(n)) for n, m in backend.engine.masters.items()}
            save_file({n: t.detach().clone() for n, t in own.items()}, str(work / f"{name}.safetensors"))
        return
    dist.init_process_group("gloo")
    for name in STAGES:
        a_spoiled_step_is_as_none(base, name, torch.bfloat16)
    a_spoiled_step_is_as_none(base, "zero3_offload", torch.float32)
    for name in ("zero2", "zero3"):
        path = work / f"{name}-{dist.get_rank()}.safetensors"
        save_file({n: t.contiguous() for n, t in followed(base, name).items()}, str(path))
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
