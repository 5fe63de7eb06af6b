"""The model, how it is computed, and adapters."""

from __future__ import annotations

from typing import Literal

from covey.options.declare import Options, only_with, option


class ModelOptions(Options):
    """Model."""

    model: str = option(
        ...,
        "Directory with weights and tokenizer, an id on the Hugging Face hub, ms::ID on ModelScope, or the "
        "word quickstart for the built-in model.",
        trl="required",
        swift="required",
        names=("model_name_or_path", "model_id_or_path"),
    )
    model_revision: str | None = option(
        None,
        "Branch, tag or commit of a model on a hub. Not set: its main branch.",
        trl="main",
        swift="not set",
        names=("revision",),
    )
    use_hf: bool = option(
        True,
        "Where ids of models and data sets without a prefix are looked for: the Hugging Face hub, or with "
        "false ModelScope.",
        swift="false",
        resume="free",
    )
    trust_remote_code: bool = option(
        False,
        "Run the Python code that comes with a model. A model of a hub then needs its --model_revision, a "
        "full commit.",
        trl="false",
    )
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "What the forward pass computes in. The weights that the optimizer updates are always float32. "
        "auto: bfloat16 on a GPU that has it, else float32.",
        trl="float32",
        swift="the model's own",
        names=("dtype", "bf16"),
        switches={"bf16": ("bfloat16", "float32")},
        words={
            "bf16": "bfloat16",
            "torch.bfloat16": "bfloat16",
            "fp32": "float32",
            "float": "float32",
            "torch.float32": "float32",
            "fp16": "float16",
            "half": "float16",
            "torch.float16": "float16",
        },
    )
    disable_dropout: bool = option(
        True,
        "Turn dropout off, so that the policy gives a token the same probability each time it is asked. With "
        "it on, the guards that compare such probabilities are off.",
        trl="false",
    )
    attn_impl: Literal["auto", "flash_attn", "sdpa", "flex", "eager"] = option(
        "auto",
        "What computes attention in training: sdpa, torch's, row by row, or in C on a CPU; flex, one "
        "compiled kernel on a GPU; flash_attn, of that package; eager, plain products. auto: flex on a "
        "GPU that has it, else sdpa.",
        trl="sdpa",
        swift="the model's own",
        names=("attn_implementation",),
        words={
            "flash_attention_2": "flash_attn",
            "flash_attention_3": "flash_attn",
            "flex_attention": "flex",
            "none": "auto",
        },
    )
    kernels: Literal["auto", "torch"] = option(
        "auto",
        "What computes attention, the head and decoding steps. auto: C on a CPU with a compiler; compiled "
        "attention, liger-kernel and CUDA graphs on a GPU. torch: the model's own modules and torch's "
        "operators alone, which is slower; to see whether another kernel is at fault.",
    )
    use_liger_kernel: Literal["auto", "true", "false"] = option(
        "auto",
        "Norms and gated layers by the kernels of the package liger-kernel. auto: on a GPU where the package "
        "is installed and knows the model.",
        trl="false",
        swift="false",
        words={"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"},
        alone="true",
    )
    gradient_checkpointing: Literal["auto", "true", "false", "selective"] = option(
        "auto",
        "Compute activations a second time in the backward pass: true, all of a layer, a third slower; "
        "selective, all but matrix products and attention, of which what is in C on a CPU is computed again, "
        "too. auto: as memory asks for it.",
        trl="true",
        swift="true",
        words={
            "yes": "true",
            "on": "true",
            "1": "true",
            "full": "true",
            "no": "false",
            "off": "false",
            "0": "false",
            "none": "false",
        },
        alone="true",
        resume="free",
    )
    activation_offloading: bool = option(
        False,
        "Keep activations in the machine's memory between the forward and the backward pass; for GPUs.",
        resume="free",
    )


class TunerOptions(Options):
    """Adapters."""

    adapters: str | None = option(
        None,
        "Directory of a saved LoRA adapter to train on; its rank, alpha and modules stay as they are. The "
        "directory of an adapter as --model means the same.",
        swift="none",
        resume="free",
    )
    ref_adapters: str = option(
        "start",
        "With adapters and beta above 0, what the reference of the KL term is: start, the adapter as it was "
        "when the run began; base, the model with the adapter off; or the directory of another adapter of "
        "the same shape.",
        trl="start",
        swift="base",
        rlhf="base",
    )

    tuner_type: Literal["full", "lora"] = option(
        "full",
        "What is trained: full, all weights; or lora, low-rank adapters beside frozen weights.",
        trl="full",
        swift="lora",
        rlhf="lora",
        names=("train_type", "sft_type", "use_peft"),
        switches={"use_peft": ("lora", "full")},
    )
    lora_rank: int = option(
        16,
        "Rank of an adapter's two matrices.",
        ge=1,
        why="The rank is the inner size of the two LoRA matrices, so it is at least 1.",
        trl="16",
        swift="8",
        rlhf=8,
        names=("lora_r",),
        read_if=only_with("tuner_type", "lora"),
    )
    lora_alpha: float = option(
        32.0,
        "Scale of the adapters: their output is multiplied by lora_alpha / lora_rank.",
        gt=0,
        why="At 0 the adapters change nothing.",
        trl="32",
        swift="32",
        rlhf=32.0,
        read_if=only_with("tuner_type", "lora"),
    )
    lora_dropout: float = option(
        0.0,
        "Dropout in front of the adapters; without effect while disable_dropout is on, which is the default.",
        ge=0,
        lt=1,
        why="It is the probability of dropping an input of the adapter.",
        trl="0.05",
        swift="0.05",
        read_if=only_with("tuner_type", "lora"),
    )
    target_modules: list[str] = option(
        ["all-linear"],
        "Modules that get an adapter, by the end of their names; all-linear: all linear layers but the head.",
        trl="peft's",
        swift="all-linear",
        names=("lora_target_modules",),
        read_if=only_with("tuner_type", "lora"),
    )
    modules_to_save: list[str] = option(
        [],
        "Modules that are trained whole beside the adapters, by the end of their names.",
        trl="none",
        swift="none",
        names=("lora_modules_to_save",),
        read_if=only_with("tuner_type", "lora"),
    )
    use_rslora: bool = option(
        False,
        "Scale by lora_alpha / sqrt(lora_rank) instead.",
        trl="false",
        swift="false",
        read_if=only_with("tuner_type", "lora"),
    )
    use_dora: bool = option(
        False,
        "Train the length of each weight column beside its direction (DoRA).",
        trl="false",
        swift="false",
        read_if=only_with("tuner_type", "lora"),
    )


_DTYPE_WORDS = {
    "bf16": "bfloat16",
    "torch.bfloat16": "bfloat16",
    "fp32": "float32",
    "torch.float32": "float32",
    "fp16": "float16",
    "torch.float16": "float16",
}


class QuantizationOptions(Options):
    """Quantization: QLoRA, an adapter beside weights of 4 or 8 bits."""

    quant_bits: Literal["4", "8"] | None = option(
        None,
        "Bits to which the linear layers of the frozen model are quantized as it is loaded; adapters, "
        "embedding and head are not. Needs tuner_type lora and pip install 'covey[qlora]'.",
        trl="not set",
        swift="not set",
    )
    quant_method: Literal["bnb", "hqq", "eetq", "quanto", "gptq", "awq", "fp8"] | None = option(
        ...,
        "The method of quantization: bnb (bitsandbytes). The others are ms-swift's, and are refused.",
        rule="bnb where quant_bits is set",
        trl="bitsandbytes",
        swift="not set",
        words={"bitsandbytes": "bnb"},
    )
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = option(
        "nf4",
        "The 16 values that a 4-bit weight can have: nf4, chosen for normally distributed weights, or fp4, "
        "floating-point numbers of 4 bits.",
        trl="nf4",
        swift="nf4",
        read_if=only_with("quant_bits", "4"),
    )
    bnb_4bit_use_double_quant: bool = option(
        True,
        "Quantize the scales of 4-bit weights too: 4.13 instead of 4.5 bits a weight.",
        trl="false",
        swift="true",
        names=("use_bnb_nested_quant",),
        read_if=only_with("quant_bits", "4"),
    )
    bnb_4bit_compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "The dtype in which layers with 4-bit weights compute. auto: that of torch_dtype.",
        trl="torch_dtype's",
        swift="torch_dtype's",
        words=_DTYPE_WORDS,
        read_if=only_with("quant_bits", "4"),
    )
    bnb_4bit_quant_storage: Literal["uint8", "float16", "bfloat16", "float32"] = option(
        "uint8",
        "The dtype of the tensors that hold the bytes of 4-bit weights. It changes no result.",
        trl="torch_dtype's",
        swift="not set",
        words={"torch.uint8": "uint8", **_DTYPE_WORDS},
        read_if=only_with("quant_bits", "4"),
    )
