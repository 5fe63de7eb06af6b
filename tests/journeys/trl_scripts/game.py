"""An environment with tools that scores itself, and a reward that looks at it."""

import random

from datasets import Dataset

from covey.trl import GRPOConfig, GRPOTrainer, RichProgressCallback


class Counter:
    def __init__(self):
        self.rng = random.Random(0)

    def reset(self, target, **kwargs) -> str:
        self.value, self.target, self.calls = 0, target, 0
        return f" Reach {target}."

    def calculate(self, expression: str) -> str:
        """
        Set the counter.

        Args:
            expression: Two numbers with * between them.

        Returns:
            The value of the counter.
        """
        left, _, right = expression.partition("*")
        self.calls += 1
        self.value = int(left) * int(right)
        return str(self.value)


def closeness(environments, target, **kwargs):
    return [-abs(env.value - goal) / 1000 for env, goal in zip(environments, target, strict=True)]


def has_called(environments, log_metric=None, **kwargs):
    if log_metric:
        log_metric("calls", sum(env.calls for env in environments) / len(environments))
    return [float(env.calls > 0) for env in environments]


if __name__ == "__main__":
    pairs = [(12, 34), (56, 78), (21, 43), (65, 87)]
    dataset = Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": f"What is {a}*{b}?"}] for a, b in pairs],
            "target": [a * b for a, b in pairs],
        }
    )
    trainer = GRPOTrainer(
        model="Qwen/Qwen3-0.6B",
        train_dataset=dataset,
        reward_funcs=[closeness, has_called],
        args=GRPOConfig(
            "game",
            chat_template_kwargs={"enable_thinking": False},
            log_completions=True,
            num_completions_to_print=1,
            logging_steps=1,
            max_steps=2,
            max_completion_length=96,
            max_tool_calling_iterations=2,
            learning_rate=1e-4,
        ),
        environment_factory=Counter,
        callbacks=[RichProgressCallback()],
    )
    trainer.train()
    print("calls", trainer.state.log_history[0]["calls"])
