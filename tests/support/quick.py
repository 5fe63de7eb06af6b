"""What `make check` runs: the architecture, the heart of a step, a resume, and a refusal of each subject."""

REFUSALS = (
    *("batch_count_zero", "group_of_one", "column_missing", "data_broken_line", "disk_too_small"),
    *("everything_at_once", "filters_out_of_range", "golds_that_do_not_parse", "lora_targets_misspelt"),
    *("memory_too_small", "model_missing", "option_misspelt", "output_holds_a_run", "plugin_missing"),
    *("resume_from_nothing", "reward_raises", "server_silent", "template_broken", "use_vllm"),
    "value_out_of_range",
)
QUICK = (
    *("arch/", "unit/algorithm/", "unit/batching/", "unit/learner/"),
    "resume/test_resume.py::test_one_process[middle of a rollout under filters]",
    *(f"faults/test_messages.py::test_message[{name}]" for name in REFUSALS),
)
