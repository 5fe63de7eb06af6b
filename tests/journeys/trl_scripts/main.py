"""A main() with a parser, a configuration with fields of its own, resuming, evaluation and a card."""

import logging
import os
import sys
from dataclasses import dataclass, field

import datasets
import transformers
from datasets import load_dataset
from transformers import set_seed
from transformers.trainer_utils import get_last_checkpoint

from covey.trl import GRPOConfig as ConfigOfTrainer
from covey.trl import GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

logger = logging.getLogger(__name__)


@dataclass
class GRPOConfig(ConfigOfTrainer):
    benchmarks: list[str] = field(default_factory=list, metadata={"help": "What to run afterwards."})
    system_prompt: str | None = field(default=None, metadata={"help": "What the system says."})
    wandb_entity: str | None = None


@dataclass
class GRPOScriptArguments(ScriptArguments):
    reward_funcs: list[str] = field(default_factory=lambda: ["digits", "short"])
    dataset_prompt_column: str = "problem"


def digits_reward(completions, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [sum(letter.isdigit() for letter in text) / (len(text) + 1) for text in texts]


def short_reward(completion_ids, **kwargs):
    return [-len(ids) / 100 for ids in completion_ids]


def main(script_args, training_args, model_args):
    set_seed(training_args.seed)
    logging.basicConfig(format="%(asctime)s - %(message)s", handlers=[logging.StreamHandler(sys.stdout)])
    level = training_args.get_process_log_level()
    logger.setLevel(logging.INFO)
    datasets.utils.logging.set_verbosity(level)
    transformers.utils.logging.set_verbosity(level)
    logger.info(
        f"rank {training_args.local_rank}, device {training_args.device}, GPUs {training_args.n_gpu}, "
        f"distributed {training_args.local_rank != -1}, 16 bits {training_args.fp16}"
    )
    last_checkpoint = None
    if os.path.isdir(training_args.output_dir):
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
    if last_checkpoint is not None and training_args.resume_from_checkpoint is None:
        logger.info(f"resuming at {last_checkpoint}")

    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)

    def make_conversation(example):
        prompt = []
        if training_args.system_prompt is not None:
            prompt.append({"role": "system", "content": training_args.system_prompt})
        prompt.append({"role": "user", "content": example[script_args.dataset_prompt_column]})
        return {"prompt": prompt}

    with training_args.main_process_first(desc="prompts"):
        dataset = dataset.map(make_conversation)
    for split in dataset:
        if "messages" in dataset[split].column_names:
            dataset[split] = dataset[split].remove_columns("messages")

    rewards = {"digits": digits_reward, "short": short_reward}
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[rewards[name] for name in script_args.reward_funcs],
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=(
            dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None
        ),
        peft_config=get_peft_config(model_args),
    )

    checkpoint = None
    if training_args.resume_from_checkpoint is not None:
        checkpoint = training_args.resume_from_checkpoint
    elif last_checkpoint is not None:
        checkpoint = last_checkpoint
    train_result = trainer.train(resume_from_checkpoint=checkpoint)
    metrics = train_result.metrics
    metrics["train_samples"] = len(dataset[script_args.dataset_train_split])
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()

    trainer.model.generation_config.eos_token_id = trainer.processing_class.eos_token_id
    trainer.save_model(training_args.output_dir)
    trainer.accelerator.wait_for_everyone()
    logger.info(f"model saved to {training_args.output_dir}")
    kwargs = {"dataset_name": script_args.dataset_name, "tags": ["open-r1"]}
    if trainer.accelerator.is_main_process:
        trainer.create_model_card(**kwargs)
        trainer.model.config.use_cache = True
        trainer.model.config.save_pretrained(training_args.output_dir)

    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["eval_samples"] = len(dataset[script_args.dataset_test_split])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if training_args.push_to_hub:
        trainer.push_to_hub(**kwargs)


if __name__ == "__main__":
    parser = TrlParser((GRPOScriptArguments, GRPOConfig, ModelConfig))
    main(*parser.parse_args_and_config())
