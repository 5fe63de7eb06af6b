"""The numbers of a batch and the rules they obey.

    N  training processes                 G   completions per prompt (num_generations)
    B  per_device_train_batch_size        mu  passes over a rollout (num_iterations)
    A  gradient_accumulation_steps        GB  completions per rollout (generation_batch_size) = N * B * S
    S  steps_per_generation

An optimizer step takes N * B * A completions, a rollout holds GB / G prompts and feeds mu * S / A steps. All
counts are completions unless they say prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from covey.options.schema import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The numbers that a batch is made of, valid or not; `least_group` is the smallest group of use."""

    num_processes: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    steps_per_generation: int
    generation_batch_size: int
    num_generations: int
    num_iterations: int
    least_group: int = 2

    @property
    def completions_per_step(self) -> int:
        """N * B * A."""
        return self.num_processes * self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def completions_per_rollout(self) -> int:
        """N * B * S, which generation_batch_size has to agree with."""
        return self.num_processes * self.per_device_train_batch_size * self.steps_per_generation


COUNTS: tuple[str, ...] = (
    "num_generations",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "num_iterations",
)
"""The options of a shape, each a whole number of at least 1."""

LARGEST_COUNT = 10**9
"""Larger counts are slips of the hand."""


def in_range(count: int) -> bool:
    """Return whether a number can be a count of the batch."""
    return 1 <= count <= LARGEST_COUNT


def shape_of(config: Config, num_processes: int) -> Shape:
    """Return the numbers of a configuration on `num_processes` training processes."""
    counts = {name: getattr(config, name) for name in COUNTS}
    least = least_group(config.advantage_estimator)
    return Shape(num_processes=num_processes, least_group=least, **counts)


def least_group(advantage_estimator: str) -> int:
    """Return the least number of completions of a prompt. Compared over the whole rollout, a completion needs
    no sibling."""
    return 1 if advantage_estimator == "reinforce_plus_plus" else 2


# Hidden values of a pass, tokens x width x layers, and tokens beyond which a CPU gains nothing from a larger
# one: its products are as fast, and its activations, about 70 bytes a value, only take memory, large tensors
# such as is got from the system anew in each pass.
_CPU_VALUES, _CPU_TOKENS = 1 << 23, 1 << 12
# Such a pass has room for so many of the longest prompt, and at most so many times that limit: a prompt that
# fills it leaves its completions many passes, of which each adds up a gradient of every weight.
_CPU_PROMPTS = 4


def tokens_per_pass(config: Config, *, longest_prompt: int, cpu_model: tuple[int, int] | None) -> int:
    """Return the tokens that one forward pass may hold: B rows of the longest prompt and completion, if
    `max_tokens_per_micro_batch` does not say otherwise.

    `cpu_model` are width and layers of a model that trains on a CPU, whose passes are not so large that they
    only cost memory; None on a GPU, and where they are not known.
    """
    if config.max_tokens_per_micro_batch is not None:
        return config.max_tokens_per_micro_batch
    rows = config.per_device_train_batch_size * (longest_prompt + config.most_tokens)
    if cpu_model is None:
        return rows
    hidden, layers = cpu_model
    enough = min(_CPU_TOKENS, _CPU_VALUES // (hidden * layers))
    return min(rows, max(1, enough, _CPU_PROMPTS * min(longest_prompt, enough)))


def faults(shape: Shape, num_prompts: int | None) -> tuple[str, ...]:
    """Return the codes of what is wrong with a shape; empty is a batch that trains.

    A count out of range stands alone, since nothing can be computed from it, and a group of one is named
    before anything that follows from it. `num_prompts` None: the size of the data set is not known.
    """
    # A group below two has its own words.
    if any(not in_range(max(getattr(shape, n), int(n == "num_generations"))) for n in COUNTS):
        return ("E208",)
    codes: list[str] = []
    per_pass = shape.num_processes * shape.per_device_train_batch_size
    if shape.num_generations < shape.least_group:
        codes.append("E201")
    if shape.generation_batch_size % per_pass:
        codes.append("E204")
    elif shape.generation_batch_size != shape.completions_per_rollout:
        codes.append("E203")
    if shape.gradient_accumulation_steps > shape.steps_per_generation:
        codes.append("E206")
    elif shape.steps_per_generation % shape.gradient_accumulation_steps:
        codes.append("E205")
    if "E201" in codes or "E203" in codes or "E204" in codes:
        return tuple(codes)
    if shape.generation_batch_size % shape.num_generations:
        codes.append("E202")
    elif num_prompts is not None and 0 < num_prompts < shape.generation_batch_size // shape.num_generations:
        codes.append("E207")
    return tuple(codes)


def with_product(shape: Shape, **changes: int) -> Shape:
    """Return a changed shape whose generation_batch_size agrees with the rest."""
    changed = replace(shape, **changes)
    return replace(changed, generation_batch_size=changed.completions_per_rollout)
