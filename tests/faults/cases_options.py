"""Bad options: names, values, contradictions, the batch, and the configuration file."""

from __future__ import annotations

from faults.case import SUMS, Case, words

_TWO_SOURCES = {"a.jsonl": SUMS, "b.jsonl": SUMS}
_MIXED = "a.jsonl b.jsonl"

CASES = (
    # -- names
    Case(name="option_misspelt", words=words("--num_generation 4")),
    Case(name="option_misspelt_with_a_bad_value", words=words("--num_generatoins four")),
    Case(name="option_unknown", words=words("--quux 3")),
    Case(name="option_of_another_tool", words=words("--lr 1e-5 --batch_size 8 --kl_coef 0.1")),
    Case(name="option_misspelt_that_is_required", words=words("").replace("--dataset", "--datset")),
    Case(name="option_that_only_sounds_alike", words=words("--guard_everything true --sleep_deep 2")),
    Case(
        name="arguments_of_a_trainer",
        words=words(
            "--callbacks x --optimizer muon --use_cpu --log_level info --log_completions --save_strategy epoch "
            "--dataset_train_split train"
        ),
    ),
    Case(
        name="options_retired_by_ms_swift",
        words=words(
            "--vllm_device cuda:1 --num_infer_workers 2 --use_lmdeploy true --tensor_parallel_size 2"
        ),
    ),
    Case(name="gc_collect_after_offload", words=words("--gc_collect_after_offload true --num_generations 1")),
    Case(name="use_vllm", words=words("--use_vllm true --vllm_mode colocate")),
    Case(
        name="vllm_where_it_cannot_run",
        words=words(
            "--vllm_mode colocate --vllm_tensor_parallel_size 3 --vllm_data_parallel_size 3 --vllm_max_model_len "
            "20 --temperature 0.005 --vllm_engine_kwargs '{\"seed\": 3}' --sleep_level 1 --nproc_per_node 2"
        ),
    ),
    Case(
        name="vllm_and_an_adapter_that_it_cannot_apply",
        words=words(
            "--vllm_mode colocate --tuner_type lora --use_dora true --modules_to_save norm --lora_rank 16 "
            "--vllm_enable_lora true --vllm_max_lora_rank 8"
        ),
    ),
    Case(name="vllm_without_a_server", words=words("--vllm_mode server")),
    Case(name="load_in_4bit", words=words("--load_in_4bit true")),
    Case(name="deepspeed", words=words("--deepspeed zero3 --fsdp full_shard")),
    Case(name="filters_on_vllm", words=words("--top_p 0.9 --min_p 0.1 --use_vllm true")),
    Case(name="filters_on_servers_with_vllm", words=words("--top_p 0.9 --top_k 50 --vllm_mode server")),
    Case(name="filters_not_numbers", words=words("--top_p nan --top_k 0.5")),
    Case(name="filters_out_of_range", words=words("--top_p 0 --top_k -3 --min_p 1.5")),
    Case(name="filters_beyond_the_model", words=words("--top_p 1.2 --top_k 100000")),
    Case(name="filters_that_keep_one_token", words=words("--top_k 1 --min_p 1")),
    Case(name="filters_at_temperature_zero", words=words("--temperature 0 --min_p 0.1 --top_p 0.9")),
    Case(
        name="filters_of_a_greedy_evaluation",
        words="eval quickstart --dataset sums.jsonl --reward_funcs accuracy --temperature 0 --min_p 0.1",
    ),
    Case(
        name="another_method",
        words=words("--rlhf_type dpo").replace("train", "rlhf", 1),
    ),
    Case(name="lora_option_of_another_tool", words=words("--lora_bias all")),
    Case(name="verb_misspelt", words="trian --model quickstart"),
    Case(name="verb_of_another_tool", words="sft --model quickstart"),
    Case(name="nothing_given", words="train"),
    # -- values
    Case(name="value_not_a_number", words=words("--beta abc")),
    Case(name="value_not_whole", words=words("--num_generations 2.5")),
    Case(name="value_missing", words=words("--save_steps --seed 3")),
    Case(name="value_not_among_the_choices", words=words("--loss_type grop")),
    Case(name="value_not_json", words=words("--columns question=problem")),
    Case(name="value_out_of_range", words=words("--epsilon 0 --save_steps 0 --seed -1")),
    Case(name="stray_word", words=words("--seed 3 4")),
    Case(name="given_twice", words=words("--tuner_type lora --lora_r 8 --lora_rank 16")),
    Case(name="temperature_zero", words=words("--temperature 0")),
    Case(name="attention_of_a_gpu", words=words("--attn_implementation flash_attention_2")),
    Case(
        name="kernels_of_a_gpu",
        words=words("--attn_impl flex --use_liger_kernel --activation_offloading true"),
    ),
    Case(name="tracker_unknown", words=words("--report_to wandbb")),
    # -- contradictions
    Case(name="warmup_twice", words=words("--warmup_steps 5 --warmup_ratio 0.1 --lr_scheduler_type linear")),
    Case(name="warmup_without_a_schedule", words=words("--warmup_ratio 0.1")),
    Case(name="dora_without_lora", words=words("--use_dora true")),
    Case(
        name="interleave_does_not_add_up",
        words=words("--interleave_prob 0.5 0.6", dataset=_MIXED),
        files=_TWO_SOURCES,
    ),
    Case(
        name="interleave_one_for_two", words=words("--interleave_prob 1", dataset=_MIXED), files=_TWO_SOURCES
    ),
    Case(
        name="streaming_without_an_end",
        words=words("--streaming true", dataset="a.jsonl"),
        files=_TWO_SOURCES,
    ),
    Case(
        name="streaming_and_splitting",
        words=words("--streaming true --max_steps 10 --split_dataset_ratio 0.1", dataset="a.jsonl"),
        files=_TWO_SOURCES,
    ),
    Case(name="evaluation_of_nothing", words=words("--eval_strategy steps")),
    Case(name="best_model_without_evaluation", words=words("--load_best_model_at_end true")),
    Case(name="early_stopping_without_evaluation", words=words("--early_stopping_patience 3")),
    Case(
        name="metric_unknown",
        words=words(
            "--val_dataset quickstart --load_best_model_at_end true --metric_for_best_model eval_rewrad"
        ),
    ),
    # -- the batch
    Case(name="group_of_one", words=words("--num_generations 1")),
    Case(
        name="group_of_one_and_a_batch_of_one",
        words=words("--num_generations 1 --per_device_train_batch_size 1"),
    ),
    Case(
        name="groups_do_not_fill_the_rollout",
        words=words("--per_device_train_batch_size 3 --gradient_accumulation_steps 2 --num_generations 4"),
    ),
    Case(name="batch_of_one", words=words("--per_device_train_batch_size 1 --num_generations 8")),
    Case(
        name="rollout_sizes_disagree",
        words=words("--per_device_train_batch_size 8 --steps_per_generation 2 --generation_batch_size 64"),
    ),
    Case(
        name="rollout_does_not_divide",
        words=words("--per_device_train_batch_size 8 --generation_batch_size 20"),
    ),
    Case(
        name="step_straddles_rollouts",
        words=words(
            "--per_device_train_batch_size 8 --gradient_accumulation_steps 2 --steps_per_generation 3"
        ),
    ),
    Case(
        name="several_rollouts_for_one_step",
        words=words(
            "--per_device_train_batch_size 8 --gradient_accumulation_steps 4 --steps_per_generation 2"
        ),
    ),
    Case(name="batch_count_zero", words=words("--per_device_train_batch_size 0")),
    Case(
        name="fewer_prompts_than_a_rollout",
        words=words(dataset="few.jsonl"),
        files={"few.jsonl": "".join(SUMS.splitlines(True)[:5])},
    ),
    Case(name="less_than_one_rollout_of_an_epoch", words=words("--num_train_epochs 0.1")),
    # -- the configuration file
    Case(
        name="yaml_key_unknown",
        words="train run.yaml",
        files={
            "run.yaml": "model: quickstart\ndataset: [sums.jsonl]\nreward_funcs: [accuracy]\nlearning_rate: 1e-4\n"
            "max_completion_length: 16\nnum_generatons: 4\n"
        },
    ),
    Case(
        name="yaml_key_twice",
        words=words("--config run.yaml"),
        files={"run.yaml": "seed: 1\nbeta: 0.1\nseed: 2\n"},
    ),
    Case(name="yaml_missing", words="train run.yml"),
    Case(
        name="yaml_section_unknown",
        words=words("--config run.yaml"),
        files={"run.yaml": "optimizers:\n  seed: 1\n"},
    ),
)
