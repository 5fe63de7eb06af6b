"""covey: reinforcement learning of language models with GRPO.

`from covey import train, plan, evaluate, export` gives the verbs of the command as functions:
`train(model="DIR", dataset="FILE.jsonl", reward_funcs=["accuracy"])`. Importing covey imports no torch; the
functions do when they run.
"""

import covey.plan  # noqa: F401  the package first: then `covey.plan` stays the function
from covey.api import evaluate, export, plan, train

__all__ = ["evaluate", "export", "plan", "train"]
