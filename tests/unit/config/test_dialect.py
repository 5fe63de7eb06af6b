"""`covey rlhf` has ms-swift's defaults where they decide the result, and what is typed comes first."""

import pytest

from covey.config import from_dict, parse, resolve
from covey.config.dialect import dialect_note, ms_swift_typed
from covey.options.schema import Config

WORDS = "--model m --dataset a.jsonl --reward_funcs accuracy --output_dir o "


def config_of(words: str) -> Config:
    parsed = parse((WORDS + words).split())
    resolved = resolve(ms_swift_typed(parsed.typed), 1, parsed.problems)
    assert resolved.problems == ()
    return resolved.config


def test_the_table() -> None:
    config = config_of("--rlhf_type grpo")
    assert (config.tuner_type, config.lora_rank, config.lora_alpha, config.lora_dropout) == (
        "lora",
        8,
        32.0,
        0.0,
    )
    assert (config.loss_type, config.beta, config.use_bias_correction_kl) == ("grpo", 0.04, False)
    assert (config.epsilon, config.epsilon_high) == (0.2, 0.2)
    assert (config.temperature, config.eval_temperature, config.max_completion_length) == (0.9, 0.9, 512)
    assert (config.learning_rate, config.lr_scheduler_type) == (1e-4, "cosine")
    assert (config.weight_decay, config.adam_beta2, config.num_train_epochs) == (0.1, 0.95, 3.0)
    # Not copied: ms-swift's batch of one, and keeping every checkpoint.
    assert (config.per_device_train_batch_size, config.save_total_limit) == (8, 2)


@pytest.mark.parametrize(
    ("words", "option", "value"),
    [
        ("--train_type full", "learning_rate", 1e-5),
        ("--train_type full --learning_rate 1e-6", "learning_rate", 1e-6),
        ("--beta 0", "beta", 0.0),
        ("--epsilon_high 0.28", "epsilon_high", 0.28),
        ("--epsilon 0.1", "epsilon_high", 0.1),
        ("--lora_rank 64", "lora_rank", 64),
    ],
)
def test_what_is_typed_comes_first(words: str, option: str, value: object) -> None:
    assert getattr(config_of(words), option) == value


def test_what_is_frozen_of_a_model_that_sees() -> None:
    """ms-swift trains the language model alone; TRL everything, or adapters there alone."""
    sees = {"vit", "aligner"}
    assert config_of("").frozen_parts == config_of("--tuner_type full").frozen_parts == sees
    assert config_of("--freeze_vit false --freeze_llm true").frozen_parts == {"aligner", "llm"}
    own = from_dict({"model": "m", "dataset": "a.jsonl", "reward_funcs": "accuracy"}).config
    assert own.frozen_parts == set()
    for options, frozen in (({}, sees), ({"freeze_aligner": False}, {"vit"})):
        lora = {"model": "m", "dataset": "a.jsonl", "reward_funcs": "accuracy", "tuner_type": "lora"}
        assert from_dict({**lora, **options}).config.frozen_parts == frozen


def test_the_note_names_what_holds() -> None:
    note = dialect_note(parse(["--beta", "0", "--temperature", "1"]).typed)
    assert "loss_type" in note.seen and "temperature" not in note.seen
    assert "checkpoints" in note.why
    # Of adapters covey's own defaults are the same.
    assert "freeze_vit" not in note.seen
    assert "freeze_vit" in dialect_note(parse(["--tuner_type", "full"]).typed).seen
