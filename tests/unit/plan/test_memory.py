"""The memory of each phase, by hand.

The model: 2 layers, hidden 8, 2 heads of width 4, 1 key head, MLP 16, vocabulary 100, tied, 1,000 weights.
The run: 4 completions of 6 tokens on 2 prompts of at most 10, in one pass of B = 4 rows.
"""

from dataclasses import replace
from typing import Any

import pytest

from covey.checks.batch import batch_plan
from covey.plan.activations import (
    CACHE_SHARE,
    FLAT_PROMPT,
    HEAD_CELLS,
    MAX_ROWS,
    PREFILL_TOKENS,
    PassSize,
    Training,
    fullest_pass,
    kept_bytes,
    kept_of_layer,
    layer_bytes,
)
from covey.plan.facts import EvalSet, Facts, ModelSizes
from covey.plan.memory import LIBRARIES, TIGHT, MemoryPlan, memory_plan, recompute_of
from covey.plan.recompute import IN_WORDS, KINDS
from covey.plan.report import report_json, report_lines
from support.checks import SIZES, changed, config, facts

MODEL = replace(
    SIZES,
    adapted=("down_proj", "q_proj", "v_proj"),
    adapted_parameters=300,
    adapter_parameters=50,
)
FACTS = facts(
    model={"sizes": MODEL}, prompts={"longest": 10}, machine={"cuda": False, "free_memory_bytes": 10**10}
)
RUN = {
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    # Four rows of 10 + 6 tokens, as a larger model's pass would hold by itself.
    "max_tokens_per_micro_batch": 64,
    "max_completion_length": 6,
    "torch_dtype": "float32",
}
FULL = Training(element=4, full=True, recompute="none", rank=3, dora=False, cuda=False, offload=False)
LORA = replace(FULL, full=False)
# Two prompts of 10 and four completions of 6; each completion attends to its prompt and to itself.
SIZE = PassSize(tokens=44, trained=24, cells=4 * 6 * 16, later=False)


def plan(given: Facts = FACTS, **options: Any) -> MemoryPlan:
    return memory_plan(config(**{**RUN, **options}), given)


def phases(given: Facts = FACTS, **options: Any) -> dict[str, dict[str, int]]:
    """The parts of each phase."""
    return {p.name: dict(p.parts) for p in plan(given, **options).phases}


def test_the_fullest_pass() -> None:
    """With A = 4 a step has 16 rows. The budget is 4 x 16 = 64 tokens: two families of 22, and no part of a
    third."""
    assert fullest_pass(config(**RUN), FACTS, 10) == SIZE
    several = config(**{**RUN, "gradient_accumulation_steps": 4})
    assert fullest_pass(several, FACTS, 10) == replace(SIZE, later=True)


def test_passes_that_go_on_from_a_prompt() -> None:
    """Of 4 completions of 6 two fit beside a prompt of 10 in 22 tokens."""
    size = fullest_pass(config(**{**RUN, "num_generations": 4, "max_tokens_per_micro_batch": 22}), FACTS, 10)
    assert size == PassSize(tokens=22, trained=12, cells=2 * 6 * 16, later=True, shared=10)
    # Of its prompt keys and values, and their gradients, of 4 numbers each, in two layers.
    alone = kept_bytes(MODEL, replace(size, shared=0), FULL)
    assert kept_bytes(MODEL, size, FULL) == alone + 2 * 10 * 2 * 4 * (4 + 4)
    # A completion is never refused, and a step that holds two of the four has all of its own.
    tight = {**RUN, "num_generations": 4, "max_tokens_per_micro_batch": 15}
    assert fullest_pass(config(**tight), FACTS, 10).tokens == 16
    part = {**tight, "per_device_train_batch_size": 2, "max_tokens_per_micro_batch": 22}
    assert fullest_pass(config(**part), FACTS, 10).shared == 0


# Full: two norms 2 x 8 x (4 + 4), inputs of the linear layers 4 x (8 + 8 + 8 + 16), gate, silu and up
# 3 x 16 x 4, queries and output of attention 2 x 8 x 4, its keys and values 2 x 4 x 4 and its log-sum-exp
# 2 x 4: 584 bytes a token.
FULL_LAYER = 44 * 584
# What is added to the scores of 384 cells in float32, once for all layers, with its mask and its ages.
MASK = 384 * (4 + 1 + 8)


def test_a_layer() -> None:
    assert layer_bytes(MODEL, SIZE, FULL) == FULL_LAYER


def test_what_makes_a_layer_larger_or_smaller() -> None:
    """In order: what is kept of a layer, from the least to the most."""
    low, adapted = replace(FULL, element=2), replace(LORA, element=2)
    kinds = [replace(FULL, recompute="full"), replace(FULL, recompute="selective"), FULL]
    assert_grows(*(kept_of_layer(MODEL, SIZE, kind) for kind in kinds))
    assert_grows(*(layer_bytes(MODEL, SIZE, kind) for kind in (adapted, replace(adapted, dora=True))))
    assert_grows(layer_bytes(MODEL, SIZE, low), layer_bytes(MODEL, SIZE, FULL))
    few = replace(MODEL, adapted=("q_proj",))
    assert_grows(layer_bytes(few, SIZE, LORA), layer_bytes(MODEL, SIZE, LORA))
    # Qwen 3 normalises queries (8) and keys (4) as well.
    with_norms = layer_bytes(replace(MODEL, family="qwen3"), SIZE, FULL)
    assert with_norms == FULL_LAYER + 44 * 12 * 8
    assert layer_bytes(replace(MODEL, family="rwkv"), SIZE, FULL) == FULL_LAYER


def assert_grows(*num_bytes: int) -> None:
    assert list(num_bytes) == sorted({*num_bytes})


# 3 blocks of 24 x 100, and the gradient of 24 hidden states.
HEAD = 3 * 9600 + 24 * 8 * 4
# Beside the layers: the mask, the last norm and the hidden states that the head reads.
LAST = MASK + 44 * 8 * 8 + 24 * 8 * 4


def test_what_is_kept_of_all_layers() -> None:
    """Computed again as a whole, a layer keeps its input alone."""
    assert kept_bytes(MODEL, SIZE, FULL) == 2 * FULL_LAYER + LAST
    assert kept_bytes(MODEL, SIZE, replace(FULL, recompute="full")) == 2 * 44 * 8 * 4 + LAST


def test_offloaded_activations_leave_the_gpu() -> None:
    """But for the hidden states that the head reads."""
    assert kept_bytes(MODEL, SIZE, replace(FULL, cuda=True, offload=True)) == 24 * 8 * 4
    on_gpu = changed(FACTS, machine={"cuda": True})
    there = phases(on_gpu, activation_offloading=True)["update"]
    assert there["activations"] < phases(on_gpu)["update"]["activations"]
    assert phases(activation_offloading=True) == phases()


def test_phases_of_full_training_in_float32() -> None:
    found = phases()
    assert list(found) == ["load", "rollout", "update", "step"]
    assert found["load"] == {"weights": 4000}
    # 2 layers x 1 key head x 4 x 2 tensors x 4 bytes for 2 prompts of 10 and 4 completions of 6, each with
    # room for its prompt
    held = {"weights": 4000, "moments": 8000, "KV cache": 64 * (4 * 16 + 2 * 10)}
    assert {n: found["rollout"][n] for n in held} == held
    assert found["step"] == held | {"gradients": 4000}
    # At the start of the backward pass: the activations, what the head works with, and its gradient.
    work = {"gradients": 0, "activations": 2 * FULL_LAYER + LAST + HEAD, "gradient of the head": 3200}
    assert found["update"] == held | work
    # A GPU computes the same.
    assert phases(changed(FACTS, machine={"cuda": True}), torch_dtype="float32")["update"] == found["update"]


def test_what_is_computed_again_holds_one_layer_more_than_it_keeps() -> None:
    """Its backward pass is fullest inside the first layer that is computed again, or in the head."""
    # the layer, and what its attention works with: 8 x 2 + 8 x 4 + 4 x 4 elements a token
    working = max(44 * (2 * 8 + 4 * 8 + 4 * 4) * 4, 44 * (2 * 8 + 3 * 16) * 4)
    most = 2 * 44 * 8 * 4 + LAST + max(FULL_LAYER + working, HEAD)
    assert phases(gradient_checkpointing="true")["update"]["activations"] == most


def test_auto_gives_up_as_little_speed_as_fits() -> None:
    given = changed(FACTS, model={"sizes": replace(MODEL, layers=1000)}, machine={"free_memory_bytes": None})
    needed = {
        kind: LIBRARIES + sum(phases(given, gradient_checkpointing=asked)["update"].values())
        for kind, asked in zip(KINDS, ("false", "selective", "true"), strict=True)
    }
    assert list(needed.values()) == sorted(needed.values(), reverse=True)
    for kind in KINDS:
        room = changed(given, machine={"free_memory_bytes": round((needed[kind] + 1000) / TIGHT)})
        assert recompute_of(config(**RUN), room) == kind
        found = plan(room)
        assert (found.recompute, found.as_dict()["recompute"]) == (kind, kind)
        assert (IN_WORDS[kind] in found.in_words()) is (kind != "none")
    none = changed(given, machine={"free_memory_bytes": 1})
    assert recompute_of(config(**RUN), none) == "full"
    for asked, kind in (("false", "none"), ("selective", "selective"), ("true", "full")):
        assert recompute_of(config(**RUN, gradient_checkpointing=asked), none) == kind


@pytest.mark.parametrize("unknown", [{"model": {"sizes": None}}, {"machine": {"free_memory_bytes": None}}])
def test_auto_computes_nothing_again_where_nothing_is_known(unknown: dict[str, Any]) -> None:
    assert recompute_of(config(**RUN), changed(FACTS, **unknown)) == "none"


def test_gradients_of_earlier_passes_are_held() -> None:
    assert phases(gradient_accumulation_steps=4)["update"]["gradients"] == 4000


def test_phases_in_bfloat16() -> None:
    """Weights in 2 bytes, their masters in 4; the gradient of the step is the masters'."""
    found = phases(torch_dtype="bfloat16")
    assert found["load"] == {"weights": 2000, "masters": 4000}
    held = {"weights": 2000, "masters": 4000, "moments": 8000, "KV cache": 32 * 84}
    assert found["step"] == held | {"gradients": 4000}
    assert phases(changed(FACTS, machine={"cuda": True}), torch_dtype="bfloat16")["step"] == found["step"]


def test_auto_is_bfloat16_on_a_gpu() -> None:
    assert "masters" not in phases(torch_dtype="auto")["step"]
    assert "masters" in phases(changed(FACTS, machine={"cuda": True}), torch_dtype="auto")["step"]


def test_lora_trains_little_and_merges_for_rollouts() -> None:
    found = phases(tuner_type="lora")
    held = {"weights": 4000, "adapters": 200, "moments": 400, "KV cache": 64 * 84}
    assert found["step"] == held | {"gradients": 200}
    assert found["rollout"]["merged weights"] == 1200
    # A frozen head has no gradient.
    assert found["update"]["gradient of the head"] == 0
    assert "merged weights" not in phases(tuner_type="lora", torch_dtype="bfloat16")["rollout"]


def test_a_reference_is_held_where_the_loss_has_one() -> None:
    found = phases(beta=0.04)
    assert found["load"] == {"weights": 4000, "reference": 4000}
    assert "annotate" in found
    assert all(found[name]["reference"] == 4000 for name in ("rollout", "annotate", "update", "step"))
    assert phases(beta=0.0, beta_end=0.04) == found
    assert "reference" not in phases(beta=0.04, tuner_type="lora")["step"]


def test_a_moving_reference_is_kept_in_float32() -> None:
    """Of 1,000 weights, in bfloat16 beside the copy that computes; of an adapter's 50 always."""
    sync = {"sync_ref_model": True, "beta": 0.04}
    low, lora = {"torch_dtype": "bfloat16"}, {"tuner_type": "lora"}
    for name in ("rollout", "annotate", "update", "step"):
        assert phases(**sync)[name] == phases(beta=0.04)[name]
        assert phases(**sync, **low)[name] == phases(beta=0.04, **low)[name] | {"reference in float32": 4000}
        for dtype in ({}, low):
            still = phases(beta=0.04, **lora, **dtype)[name]
            assert phases(**sync, **lora, **dtype)[name] == still | {"reference adapter": 200}
    assert phases(sync_ref_model=True, beta=0.0, beta_end=0.1, **lora)["step"]["reference adapter"] == 200


def test_old_logprobs_are_annotated_where_a_rollout_trains_twice() -> None:
    assert "annotate" not in phases()
    assert "annotate" in phases(num_iterations=2)


def test_ddp_has_buckets() -> None:
    assert phases(changed(FACTS, launch={"num_processes": 2}))["step"]["DDP buckets"] == 4000
    assert plan(changed(FACTS, launch={"num_processes": 2})).needed_bytes > 2 * LIBRARIES


def test_processes_share_a_machine_and_not_a_gpu() -> None:
    gpus = plan(changed(FACTS, launch={"num_processes": 2}, machine={"cuda": True}))
    assert gpus.needed_bytes == gpus.binding.num_bytes + LIBRARIES


def test_rows_of_the_cache() -> None:
    """At most 256 rows, and those for which 0.3 of the memory that is free is enough."""
    many = {"per_device_train_batch_size": 1000, "num_generations": 2}
    run = config(**{**RUN, **many})
    cache = {p.name: p.parts for p in memory_plan(run, FACTS).phases}["step"]["KV cache"]
    assert cache == 64 * (256 * 16 + 256 * 10)
    # 0.3 x (24,000 - 4,000) = 6,000 bytes are 5 rows of 64 x 16 bytes
    tight = {
        p.name: p.parts
        for p in memory_plan(run, changed(FACTS, machine={"free_memory_bytes": 24_000})).phases
    }
    assert tight["rollout"]["KV cache"] == 64 * 5 * 26


def test_a_long_prompt_is_in_the_cache_once() -> None:
    assert phases(changed(FACTS, prompts={"longest": 65}))["step"]["KV cache"] == 64 * (4 * 6 + 2 * 65)


def test_an_evaluation_may_need_the_larger_cache() -> None:
    given = changed(FACTS, data={"eval_sets": (EvalSet(name="v", num_prompts=30),)})
    assert phases(given, val_dataset=["v.jsonl"])["step"]["KV cache"] == 64 * 30 * 26
    assert phases(given, val_dataset=["v.jsonl"], eval_strategy="no")["step"]["KV cache"] == 64 * 84


def test_the_cache_of_generate_does_not_stay() -> None:
    found = phases(engine="generate")
    assert found["rollout"]["KV cache"] == 64 * 4 * 26
    assert "KV cache" not in found["step"]


def test_nothing_is_sampled_where_rollouts_are_replayed() -> None:
    assert "rollout" not in phases(replay_rollouts="r")


@pytest.mark.parametrize("unknown", [{"model": {"sizes": None}}, {"prompts": {"longest": None}}])
def test_nothing_is_forecast_of_what_is_not_known(unknown: dict[str, Any]) -> None:
    found = plan(changed(FACTS, **unknown))
    assert (found.phases, found.in_words(), found.share) == ((), [], 0.0)
    assert found.as_dict()["peak_bytes"] is None


def test_a_stream_takes_the_cap_for_its_longest_prompt() -> None:
    unread = changed(FACTS, prompts={"longest": None}, data={"num_rows": None})
    assert plan(unread, max_length=10).phases == plan().phases


def test_words() -> None:
    given = changed(FACTS, model={"sizes": replace(MODEL, parameters=10**9)})
    assert plan(given).in_words() == [
        "load 4 GB, rollout 12 GB, update 16 GB, step 16 GB",
        "the largest phase is update: moments 8 GB + weights 4 GB + gradients 4 GB",
        "about 16.5 GB with Python and its libraries; 10 GB are free",
    ]


def test_report() -> None:
    asked = config(**RUN)
    batch = batch_plan(asked, 1, 1000)
    lines = report_lines(asked, FACTS, batch)
    at = next(i for i, line in enumerate(lines) if line.startswith("memory    "))
    assert [line[:10].strip() for line in lines[at : at + 4]] == ["memory", "", "", "disk"]
    (brief,) = [n for n in report_lines(asked, FACTS, batch, brief=True) if n.startswith("memory")]
    assert brief == f"memory    {plan().in_words()[-1]}"
    content = report_json(asked, FACTS, batch)["memory"]
    assert content["binding"] == "update"
    assert content["peak_bytes"] == content["phases"]["update"]["bytes"] == plan().binding.num_bytes


def test_limits_are_those_of_the_code() -> None:
    from covey.kernels import protocol
    from covey.rollout.native import caches, engine

    assert {device: cells for device, (_, cells) in protocol._BLOCK.items()} == HEAD_CELLS
    assert engine._PREFILL_TOKENS == PREFILL_TOKENS
    assert caches._FLAT_PROMPT == FLAT_PROMPT
    assert caches._SHARE == CACHE_SHARE
    assert engine.NativeEngine.__init__.__kwdefaults__["max_rows"] == MAX_ROWS


def test_the_base_of_an_adapter_is_cast_before_it_goes_to_the_gpu() -> None:
    gpu = changed(FACTS, machine={"cuda": True, "has_bfloat16": True})
    low = {"tuner_type": "lora", "torch_dtype": "bfloat16"}
    assert phases(gpu, **low)["load"] == {"weights": 2000, "adapters": 200}
    # On a CPU it is cast where it was loaded.
    assert phases(**low)["load"] == {"weights": 4000, "adapters": 200}


@pytest.mark.parametrize("gigabytes", [22, 39, 47])
def test_lora_of_seven_billion_fits_a_gpu_of_24_gb(gigabytes: int) -> None:
    qwen = ModelSizes(
        family="qwen2", layers=28, hidden=3584, heads=28, kv_heads=4, head_width=128, intermediate=18944,
        vocabulary=152064, tied=False, parameters=7_615_616_512, adapted_parameters=6_525_288_448,
        adapted=("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"),
        adapter_parameters=40_370_176,
    )  # fmt: skip
    free = gigabytes * 10**9
    given = facts(
        model={"sizes": qwen}, prompts={"longest": 256}, machine={"cuda": True, "free_memory_bytes": free}
    )
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "max_completion_length": 512}
    assert memory_plan(config(tuner_type="lora", **sizes), given).fits


def test_files_that_are_joined_are_whole_while_they_load() -> None:
    """On a CPU in the memory of the run: float32 of all weights in each process of a split model."""
    split = changed(FACTS, launch={"num_processes": 4}, layout=replace(FACTS.layout, zero_stage=3, fsdp=True))
    split = changed(split, model={"sizes": replace(MODEL, layers=10)})
    joined = changed(split, model={"sizes": replace(MODEL, layers=10, is_joined=True)})
    before, after = (phases(given)["load"] for given in (split, joined))
    assert "copy while loading" not in before and after["copy while loading"] == 4 * 1000
    assert plan(joined).load_host_bytes == 0, "it is counted once"
    whole = replace(joined, layout=FACTS.layout)
    assert phases(whole)["load"] == phases(changed(whole, model={"sizes": split.model.sizes}))["load"]
