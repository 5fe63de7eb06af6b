"""Whether forward passes have room for the siblings of a prompt, which they then compute once for all."""

from __future__ import annotations

from covey.config.schema import Config
from covey.plan.activations import tokens_held
from covey.plan.check_memory import fits
from covey.plan.facts import Facts
from covey.plan.problem import warning
from covey.plan.shape import counted, faults, shape_of
from covey.types import Fix, Problem

# A larger pass is offered where it takes so little more memory, and leaves at most so much of the work.
_MOST_MEMORY, _MOST_WORK = 1.25, 2 / 3


def pass_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return a word on passes with little room beside long prompts, and the size that makes room; nothing
    where the batch is at fault, where a kernel shares no prompt, or where prompts are not known."""
    mean, longest = round(facts.mean_prompt or 0), facts.longest_prompt
    shape = shape_of(config, facts.num_processes)
    if not mean or not longest or config.attn_impl == "flash_attn" or config.max_completion_length < 1:
        return []
    if faults(shape, facts.num_prompts):
        return []
    completion = config.max_completion_length
    # A single row is never refused.
    held = max(tokens_held(config, facts, longest), longest + completion)
    siblings = min(shape.num_generations, shape.completions_per_step // shape.num_processes)

    def passes(tokens: int) -> int:
        return -(-siblings // max(1, (tokens - mean) // completion))

    def work(tokens: int) -> int:
        return passes(tokens) * mean + siblings * completion

    roomy = (longest + -(-siblings // n) * completion for n in range(1, siblings + 1))
    larger = next((tokens for tokens in roomy if tokens <= _MOST_MEMORY * held), held)
    change = {"max_tokens_per_micro_batch": larger}
    if work(larger) > _MOST_WORK * work(held) or not fits(config, facts, change):
        return []
    is_typed = config.max_tokens_per_micro_batch is not None
    option = "max_tokens_per_micro_batch" if is_typed else "per_device_train_batch_size"
    fix = f"{counted(passes(larger), 'pass', 'es')}, and {work(larger):,} tokens in place of {work(held):,}"
    return [
        warning(
            "W119",
            option,
            f"A prompt of {mean:,} tokens, the mean, is computed in up to {passes(held)} forward passes: one "
            f"holds {held:,} tokens, and each of its {siblings} completions has up to {completion:,}.",
            f"A small {option}, prompts that are long, and completions that are short.",
            Fix(text=fix, edits=change),
        )
    ]
