"""What vLLM does not do, or not for covey, wherever it is planned or started."""

from __future__ import annotations

from covey.texts import tr

UNTRIED = tr("vLLM on a GPU: we have not tested this yet")
"""What is said of it wherever it is planned or started."""

LEAST_TEMPERATURE = 0.01
"""At which vLLM samples in the place of a lower temperature, but for 0."""

OWNED: frozenset[str] = frozenset(
    (
        *("model", "tokenizer", "skip_tokenizer_init", "generation_config", "dtype", "seed", "load_format"),
        *("logprobs_mode", "worker_extension_cls", "enable_lora", "max_lora_rank", "max_loras"),
        *("distributed_executor_backend", "trust_remote_code", "enable_sleep_mode", "data_parallel_size"),
        *("max_model_len", "max_num_seqs", "tensor_parallel_size", "gpu_memory_utilization"),
        *("enforce_eager", "enable_prefix_caching", "kv_cache_memory_bytes", "max_logprobs"),
        *("limit_mm_per_prompt", "mm_processor_kwargs", "mm_device_do_normalize", "mm_processor_cache_gb"),
    )
)
"""Arguments of vLLM that `vllm_engine_kwargs` may not set: each has an option of its own, or covey needs it
as it is."""
