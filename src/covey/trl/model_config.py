"""TRL's `ModelConfig`, and the adapter, quantization and device that it describes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from covey.checks.launch import num_ranks
from covey.texts import tr

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig


@dataclass
class ModelConfig:
    """The model of a script, by the names of TRL."""

    model_name_or_path: str | None = None
    model_revision: str = "main"
    dtype: str | None = field(
        default="float32", metadata={"choices": ["auto", "bfloat16", "float16", "float32"]}
    )
    attn_implementation: str | None = None
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: list[str] | None = None
    lora_target_parameters: list[str] | None = None
    lora_modules_to_save: list[str] | None = None
    lora_task_type: str = "CAUSAL_LM"
    use_rslora: bool = False
    use_dora: bool = False
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = field(default="nf4", metadata={"choices": ["fp4", "nf4"]})
    use_bnb_nested_quant: bool = False
    bnb_4bit_quant_storage: str | None = None

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError(tr("load_in_8bit and load_in_4bit are both set; a model is quantized once."))
        if isinstance(self.lora_target_modules, list) and len(self.lora_target_modules) == 1:
            # `all-linear` and patterns are words to peft, not names in a list.
            self.lora_target_modules = self.lora_target_modules[0]  # type: ignore[assignment]


def get_peft_config(model_args: ModelConfig) -> LoraConfig | None:
    """Return the adapter of a model, None without `use_peft`."""
    if not model_args.use_peft:
        return None
    from peft import LoraConfig

    return LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=model_args.lora_target_modules,
        target_parameters=model_args.lora_target_parameters,
        modules_to_save=model_args.lora_modules_to_save,
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        bias="none",
    )


def get_quantization_config(model_args: ModelConfig) -> BitsAndBytesConfig | None:
    """Return how the weights of a model are quantized, None where they are not."""
    if not model_args.load_in_4bit and not model_args.load_in_8bit:
        return None
    from transformers import BitsAndBytesConfig

    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=model_args.dtype,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
    )


def get_kbit_device_map() -> dict[str, int] | None:
    """Return the device map of a quantized model: the GPU of this process, None on a CPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    return {"": int(os.environ["LOCAL_RANK"]) if num_ranks(os.environ) > 1 else 0}
