"""`GRPOConfig` of TRL as a plain dataclass: what its fields lead to, and what scripts read of it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

from covey.checks.launch import num_ranks
from covey.trl.accelerator import wait_for_all
from covey.trl.fields import Fields

if TYPE_CHECKING:
    import torch

_JSON = (
    *("accelerator_config", "fsdp_config", "deepspeed", "parallelism_config", "liger_kernel_config"),
    *("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs", "lr_scheduler_kwargs"),
    *("model_init_kwargs", "generation_kwargs", "chat_template_kwargs"),
    *("transformers_continuous_batching_config", "covey_options"),
)
_WHOLE_NUMBERS = ("logging_steps", "eval_steps", "save_steps", "warmup_steps")
_LEVELS = {"detail": 10, "debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


@dataclass
class GRPOConfig(Fields):
    """Hold what TRL's GRPOConfig holds, without TRL, accelerate or transformers.

    `covey_options` are options of covey that TRL has no field for, by their names. A class of a script may
    add fields. Values are checked when training begins, all of them at once.
    """

    covey_options: dict | str | None = None
    # Fields of older versions, which scripts still set.
    max_prompt_length: int | None = None
    warmup_ratio: float | None = None
    evaluation_strategy: str | None = None

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, Enum):
                setattr(self, name, value.value)
            elif name in _WHOLE_NUMBERS and isinstance(value, float) and value.is_integer():
                setattr(self, name, int(value))
            elif name in _JSON and isinstance(value, str) and value.startswith("{"):
                setattr(self, name, _typed_words(json.loads(value)))
        if self.evaluation_strategy is not None:
            self.eval_strategy, self.evaluation_strategy = self.evaluation_strategy, None
        self._mirror_checkpointing()
        self._complete_batch()
        self.output_dir = os.path.expanduser(self.output_dir or "trainer_output")
        if isinstance(self.include_num_input_tokens_seen, bool):
            self.include_num_input_tokens_seen = "all" if self.include_num_input_tokens_seen else "no"
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        if self.report_to is None or isinstance(self.report_to, str):
            self.report_to = [] if self.report_to in (None, "none") else [self.report_to]
        elif self.report_to == ["none"]:
            self.report_to = []
        if self.debug is None or isinstance(self.debug, str):
            self.debug = (self.debug or "").split()
        if self.eval_strategy not in ("no", None):
            self.do_eval = True
        if self.eval_strategy == "steps" and not self.eval_steps:
            self.eval_steps = self.logging_steps
        if self.vllm_importance_sampling_cap is not None:
            self.vllm_importance_sampling_clip_max = self.vllm_importance_sampling_cap

    def _mirror_checkpointing(self) -> None:
        """The two names of activation checkpointing have one value; the newer name decides."""
        for new, old in (
            ("activation_checkpointing", "gradient_checkpointing"),
            ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
        ):
            value = getattr(self, old) if getattr(self, new) is None else getattr(self, new)
            setattr(self, new, value)
            setattr(self, old, value)

    def _complete_batch(self) -> None:
        """One of the two that say how much a rollout samples follows from the other, as in TRL."""
        per_pass = self.per_device_train_batch_size * self.world_size
        if self.steps_per_generation is None:
            self.steps_per_generation = (
                self.gradient_accumulation_steps
                if self.generation_batch_size is None
                else max(1, self.generation_batch_size // max(1, per_pass))
            )
        if self.generation_batch_size is None:
            self.generation_batch_size = per_pass * self.steps_per_generation

    @property
    def world_size(self) -> int:
        """The number of processes that a launcher has started for this run."""
        return num_ranks(os.environ)

    @property
    def process_index(self) -> int:
        """The number of this process among all."""
        return int(os.environ["RANK"]) if self.world_size > 1 else 0

    @property
    def local_process_index(self) -> int:
        """The number of this process among those of its machine."""
        return int(os.environ["LOCAL_RANK"]) if self.world_size > 1 else 0

    @property
    def should_save(self) -> bool:
        """Whether this process writes files."""
        return self.process_index == 0

    @property
    def should_log(self) -> bool:
        """Whether this process prints."""
        return (self.local_process_index if self.log_on_each_node else self.process_index) == 0

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        import torch

        return torch.device("cuda", self.local_process_index) if self.n_gpu else torch.device("cpu")

    @property
    def n_gpu(self) -> int:
        """1 where this process has a GPU, else 0: a process uses one GPU at most."""
        import torch

        return int(torch.cuda.is_available())

    @property
    def train_batch_size(self) -> int:
        """The completions of a forward pass of this process."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Return per_device_eval_batch_size, a number of completions."""
        return self.per_device_eval_batch_size

    def get_process_log_level(self) -> int:
        """Return the level of Python's logging that the fields ask for in this process."""
        word = self.log_level if self.should_log else self.log_level_replica
        return _LEVELS.get(word, logging.WARNING)

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Run the body in the first process, of each machine with `local`, and then in the others."""
        is_first = (self.local_process_index if local else self.process_index) == 0
        if not is_first:
            wait_for_all(self.world_size)
        try:
            yield
        finally:
            if is_first:
                wait_for_all(self.world_size)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, those of a subclass too; tokens are replaced by their names."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.init}
        return {name: f"<{name.upper()}>" if name.endswith("_token") else v for name, v in values.items()}

    def to_json_string(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2, default=str)


def options_of(config: GRPOConfig) -> dict[str, Any]:
    """Return the fields of GRPOConfig for `covey.train`, without those that a subclass adds.

    A `local_rank` that repeats what the launcher says in LOCAL_RANK is left out.
    """
    options = {one.name: getattr(config, one.name) for one in fields(GRPOConfig) if hasattr(config, one.name)}
    if str(options["local_rank"]) == os.environ.get("LOCAL_RANK"):
        del options["local_rank"]
    return options


def _typed_words(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a JSON object, with numbers, true and false in the place of words that spell them."""
    return {name: _typed(value) for name, value in values.items()}


def _typed(value: Any) -> Any:
    if isinstance(value, dict):
        return _typed_words(value)
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if value.isdigit():
        return int(value)
    return float(value) if value.replace(".", "", 1).isdigit() else value
