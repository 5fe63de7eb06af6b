"""What each of two ranks does that are one vLLM and play episodes of several turns; see test_turns.py."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from covey.activity import Stopped
from covey.comm import Comm, GroupComm, neighbours
from covey.data.text import TextCodec, load_codec
from covey.models.load import load_policy
from covey.models.lora import plain_weights
from covey.quickstart import task
from covey.rollout.slots import CollectPlan, slots_of
from covey.rollout.turns import TurnLoop
from covey.rollout.vllm.engine import VllmEngine
from covey.rollout.vllm.group import GroupEngine
from covey.types import SamplingParams
from support.sums import Played, forward_gaps, sum_prompts, sums_agents
from support.vllm_learner import Learner, settings


def played(engine: GroupEngine, codec: TextCodec, comm: Comm, delay: Any) -> Played:
    """The episodes of the first rank; the other one has none."""
    sampling = SamplingParams(temperature=1.0, max_new_tokens=96, stop_token_ids=codec.stop_token_ids)
    plan = CollectPlan(num_generations=4, sampling=sampling, seed=1)
    slots = [] if comm.rank else slots_of(sum_prompts(codec, 4), plan)
    agents = sums_agents(codec, delay, max_tokens=96)
    with comm.activity.stoppable_between_steps():
        found = dict(TurnLoop(slots, engine, codec, agents, comm.activity).episodes())
    return Played([found[number] for number in range(len(slots))])


def stopped(engine: GroupEngine, codec: TextCodec, comm: Comm) -> dict[str, Any]:
    """A signal that reaches the second rank when it has stepped ten times; answers take a second."""
    step, num_steps, began = engine._own.step, 0, time.monotonic()

    def count() -> Any:
        nonlocal num_steps
        num_steps += 1
        comm.activity.is_asked_to_stop = bool(comm.rank) and num_steps >= 10
        return step()

    engine._own.step = count  # type: ignore[method-assign]
    raised = ""
    try:
        played(engine, codec, comm, lambda key, turn: 1.0)
    except Stopped as error:
        raised = type(error).__name__
    engine._own.step = step  # type: ignore[method-assign]
    comm.activity.is_asked_to_stop = False
    return {"stopped": raised, "seconds": time.monotonic() - began}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    comm = neighbours(GroupComm(), 2)
    codec = load_codec(task.MODEL_DIR)
    policy = load_policy(task.MODEL_DIR, device=torch.device("cpu"), disable_dropout=True)
    learner = Learner(policy.eval(), {n: t.detach().clone() for n, t in plain_weights(policy)})
    given = settings(
        tensor_parallel=2, by_torchrun=True, group_name=f"covey-turns-{os.environ['MASTER_PORT']}"
    )
    engine = GroupEngine(VllmEngine(given, comm=comm, tokenizer=codec.tokenizer), comm)
    engine.publish(learner.weights(), 0)
    truth = AutoModelForCausalLM.from_pretrained(task.MODEL_DIR, dtype=torch.float64).eval()
    now = played(engine, codec, comm, None)
    late = played(engine, codec, comm, lambda key, turn: 0.02 * ((7 * key + 3 * turn) % 9))
    number = torch.tensor([comm.rank + 1.0])
    dist.all_reduce(number)
    found = {
        "tokens": now.tokens,
        "late": late.tokens,
        "gap": forward_gaps(truth, now.sequences).worst if now.episodes else 0.0,
        "computed": engine._own.num_computed,
        "in step": number.item() == 3.0,
        **stopped(engine, codec, comm),
    }
    Path(sys.argv[1]).write_text(json.dumps(found))
    engine.close()


if __name__ == "__main__":
    main()
