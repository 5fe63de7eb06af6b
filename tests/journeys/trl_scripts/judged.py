"""A reward model in a directory, a reward that is a coroutine, and one that logs."""

import asyncio
import re

from datasets import Dataset

from covey.trl import GRPOConfig, GRPOTrainer
from covey.trl.rewards import get_soft_overlong_punishment


async def remote_judge(prompts, completions, **kwargs):
    async def ask(prompt, completion):
        await asyncio.sleep(0.01)
        return float(len(completion) % 3)

    return list(await asyncio.gather(*map(ask, prompts, completions)))


def exact(completions, ground_truth, log_extra=None, log_metric=None, trainer_state=None, **kwargs):
    found = [re.search(r"=(\d+)", completion) for completion in completions]
    answers = [match.group(1) if match else "[none]" for match in found]
    rewards = [float(one == truth) for one, truth in zip(answers, ground_truth, strict=True)]
    if log_extra:
        log_extra("extracted", answers)
    if log_metric:
        log_metric("exact_share", sum(rewards) / len(rewards))
        log_metric("step_seen", float(trainer_state.global_step))
    return rewards


def only_math(task, **kwargs):
    return [1.0 if one == "math" else None for one in task]


if __name__ == "__main__":
    rows = [
        {"prompt": f"{n}+{n}", "ground_truth": str(2 * n), "task": ("math", "code")[n % 2]} for n in range(8)
    ]
    trainer = GRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=["reward-model", remote_judge, exact, only_math, get_soft_overlong_punishment(12, 4)],
        train_dataset=Dataset.from_list(rows),
        args=GRPOConfig(
            "judged",
            reward_weights=[1.0, 0.5, 2.0, 0.1, 1.0],
            max_steps=2,
            max_completion_length=12,
            learning_rate=1e-3,
            logging_steps=1,
            loss_type="dr_grpo",
            scale_rewards=False,
        ),
    )
    trainer.train()
    logs = trainer.state.log_history[0]
    print(sorted(name for name in logs if "rewards/" in name or name in ("exact_share", "step_seen")))
