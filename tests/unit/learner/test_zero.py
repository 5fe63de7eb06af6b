"""DeepSpeed's stages in two processes: a gradient that is not finite leaves nothing behind, a reference that
follows the policy is that of one process, and masters have the digits of the model's files."""

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
from covey.learner.optimizer import NonFiniteGradient
from covey.learner.reference import MovingReference
from covey.learner.sharding.build import meta_policy, rows_of_source
from covey.learner.sharding.partitions import Partitioned
from covey.learner.sharding.reference import SplitReference
from covey.models.load import load_policy, read_policy
from covey.models.policy import Policy
from covey.models.probe import micro_of
from covey.plan.deepspeed import engine_settings
from covey.plan.layout import PRESETS, Layout
from covey.token_streams import Row
from support.checks import config, facts
from support.models import save_model
from support.options import algorithm, learner
from support.processes import run_in_processes

CPU = torch.device("cpu")
OPTIMIZER = learner(adam_epsilon=1e-3, weight_decay=0.1, max_grad_norm=0.5)
STAGES = ("zero2", "zero2_offload", "zero3", "zero3_offload")


def settings(name: str) -> dict[str, Any]:
    """What the engine of a preset is configured with; of these models nothing is too small to be split."""
    stage, offload = PRESETS[name]
    layout = Layout(num_gpus=2, gpu_bytes=0, zero_stage=stage, offload=offload)
    found = engine_settings(config(deepspeed=name), facts(layout=layout, machine={"cuda": False}))
    found["zero_optimization"]["stage3_param_persistence_threshold"] = 100
    return found


def whole(base: Path) -> Policy:
    """The policy of a directory, in float32."""
    policy = load_policy(base, device=CPU, disable_dropout=True)
    policy.use_stream("padded")
    return policy


def made(base: Path, name: str, dtype: torch.dtype, *, follows: bool = False) -> Any:
    """The backend of a preset; `single` is one process."""
    pace = algorithm(sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.5)
    if name.startswith("zero3"):
        meta = meta_policy(base, None, adapter=None, seed=0, dtype=dtype, trust_remote_code=False)
        sampler = meta_policy(base, None, adapter=None, seed=0, dtype=dtype, trust_remote_code=False)
        meta.policy.runs_on = sampler.policy.runs_on = CPU
        with rows_of_source(meta, base, trust_remote_code=False) as read:
            partition(meta.policy, settings(name), read, dtype)
            own = Partitioned(ZeroEngine(meta.policy, settings(name), OPTIMIZER))
            own.fill_masters(read)
        moving = SplitReference(own, pace) if follows else None
        return Zero3Backend(own, sampler.policy, OPTIMIZER, compute_dtype=dtype, moving=moving)
    policy = whole(base)
    reference = whole(base).requires_grad_(False).eval() if follows else None
    moving = MovingReference(policy, reference, pace, dtype=dtype) if follows else None
    if name == "single":
        return SingleBackend(policy, OPTIMIZER, compute_dtype=dtype, reference=reference, moving=moving)
    engine = whole_engine(policy, settings(name), OPTIMIZER, dtype)
    return Zero2Backend(engine, OPTIMIZER, reference=reference, moving=moving)


def rows(step: int) -> list[Row]:
    generator = torch.Generator().manual_seed(step)
    made = []
    for number, length in enumerate((9, 14, 21, 6)):
        tokens = torch.randint(300, (length,), generator=generator).tolist()
        trained = [False] * 4 + [True] * (length - 4)
        made.append(Row(token_ids=tokens, is_trained=trained, prompt_length=4, prompt_key=number))
    return made


def take_step(backend: Any, step: int, *, spoiled: bool = False) -> None:
    """A step over the rows of this rank, each a micro-batch; a spoiled one has a loss of NaN on the first."""
    factors = [math.nan if spoiled and backend.dp_rank == 0 and i == 2 else 1.0 for i in range(4)]
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


def a_spoiled_step_is_as_none(base: Path, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights, masters, moments and step counts stay, and the next step has the same bits; returns the whole
    masters as they were before any step."""
    undisturbed, disturbed = made(base, name, dtype), made(base, name, dtype)
    engine = undisturbed.engine
    masters = {n: engine.fragments.whole(n, m.detach()) for n, m in engine.masters.items()}
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
    return masters


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
    if name == "zero3":
        whole = {n: t.clone() for n, t in backend.split.whole()}
        some = [n for n in whole if "norm" in n or "up_proj" in n]
        assert_equal({n: t.clone() for n, t in backend.split.each_whole(some)}, {n: whole[n] for n in some})
    tensors = {p.name: p.tensor.clone() for p in backend.moving.shards(0, 1)}
    backend.close()
    return {**found, **{f"piece/{n}": t for n, t in tensors.items()}}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes have left of all stages, and the model."""
    folder = tmp_path_factory.mktemp("zero")
    save_model("qwen2", folder / "base", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    run_in_processes(__file__, folder)
    return folder


@pytest.mark.multi
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_a_reference_that_follows_is_that_of_one_process(name: str, work: Path) -> None:
    expected = followed(work / "base", "single")
    found = [load_file(str(work / f"{name}-{rank}.safetensors")) for rank in range(2)]
    together = {**found[0], **found[1]}
    assert together.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.allclose(together[key], tensor, atol=2e-6), key
    assert not torch.allclose(together["reference"], together["old"], atol=1e-4)


@pytest.mark.multi
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_parts_that_have_lost_digits_have_masters_that_have_not(name: str, work: Path) -> None:
    """Of a model that is saved in float32, in bfloat16."""
    expected = {f"model.{n}": p for n, p in read_policy(work / "base", False).model.named_parameters()}
    assert_equal(load_file(str(work / f"masters-{name}.safetensors")), dict(expected))


def _main(work: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, base = dist.get_rank(), work / "base"
    for name in STAGES:
        masters = a_spoiled_step_is_as_none(base, name, torch.bfloat16)
        if rank == 0:
            save_file(masters, str(work / f"masters-{name}.safetensors"))
    a_spoiled_step_is_as_none(base, "zero3_offload", torch.float32)
    for name in ("zero2", "zero3"):
        tensors = {n: t.contiguous() for n, t in followed(base, name).items()}
        save_file(tensors, str(work / f"{name}-{rank}.safetensors"))
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
