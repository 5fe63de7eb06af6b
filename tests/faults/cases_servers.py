"""Rollout servers that a run cannot use, and servers that cannot start."""

from __future__ import annotations

from pathlib import Path

from faults.case import Case, words

# Nothing listens on the port of "discard".
_NOBODY = "http://127.0.0.1:9"


def _token(here: Path) -> None:
    (here / "a.token").write_text("0123456789abcdef\n")


def _open_token(here: Path) -> None:
    _token(here)
    (here / "a.token").chmod(0o644)


CASES = (
    Case(name="server_without_token", words=words(f"--rollout_servers {_NOBODY}")),
    Case(
        name="server_token_missing",
        words=words(f"--rollout_servers {_NOBODY} --rollout_token_file none.token"),
    ),
    Case(
        name="server_silent",
        words=words(f"--rollout_servers {_NOBODY} 127.0.0.1:8000 --rollout_token_file a.token"),
        make=_token,
    ),
    Case(
        name="server_lists_of_two_lengths",
        words=words("--vllm_server_host a b c --vllm_server_port 8000 8001 --rollout_token_file none.token"),
    ),
    Case(name="server_options_without_a_server", words=words("--rollout_timeout 5 --num_generations 1")),
    Case(
        name="ahead_without_a_server",
        words=words("--async_generate true --use_vllm true --use_decoupled_loss true"),
    ),
    Case(name="ahead_under_ray", words=words("--max_staleness 2 --launcher ray")),
    Case(
        name="ahead_with_an_adapter_of_vllm",
        words=words(
            f"--max_staleness 2 --use_vllm true --vllm_mode server --vllm_enable_lora true --tuner_type lora "
            f"--rollout_servers {_NOBODY} --rollout_token_file a.token"
        ),
        make=_token,
    ),
    Case(name="server_open_to_others", words="rollout --model quickstart --host 10.0.0.5"),
    Case(name="server_without_model", words="rollout"),
    Case(
        name="server_with_an_unknown_scheduler",
        words="rollout --model quickstart --multi_turn_scheduler no_such_scheduler",
    ),
    Case(
        name="server_with_options_of_a_scheduler_alone",
        words="rollout --model quickstart --max_turns 3 --gym_env lake",
    ),
    Case(
        name="server_native_with_options_of_vllm",
        words="rollout --model quickstart --vllm_tensor_parallel_size 2 --vllm_enforce_eager true",
    ),
    Case(
        name="server_of_vllm_with_kernels",
        words="rollout --model quickstart --engine vllm --kernels torch --vllm_engine_kwargs {}",
    ),
    Case(
        name="server_with_a_rank_that_vllm_does_not_apply",
        words="rollout --model quickstart --engine vllm --vllm_max_lora_rank 700",
    ),
    Case(name="server_of_no_model", words="rollout --model nothing-here --port 70000 --max_rows 0"),
    Case(
        name="server_token_of_others",
        words="rollout --model quickstart --port 0 --token_file a.token",
        make=_open_token,
    ),
    Case(
        name="server_certificate_missing", words="rollout --model quickstart --port 0 --ssl_certfile cert.pem"
    ),
    Case(
        name="server_of_ms_swift",
        words="rollout --model Qwen/Qwen2.5-7B --infer_backend vllm --vllm_max_model_len 4096 --port 8001",
    ),
    Case(name="server_of_trl", words="vllm-serve --model Qwen/Qwen2.5-7B --tensor_parallel_size 2"),
    Case(name="server_of_trl_by_its_name", words="trl vllm-serve --model m --host 127.0.0.1 --port 8002"),
)
