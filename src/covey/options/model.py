"""The model, how it is computed, and adapters."""

from __future__ import annotations

from typing import Literal

from covey.options.declare import Options, PathKind, only_with, option
from covey.types.media import PARTS, Part


class ModelOptions(Options):
    """Model."""

    model: str = option(
        ...,
        "Directory with weights and tokenizer, an id on the Hugging Face hub, ms::ID for ModelScope, or "
        "quickstart, quickstart-tools or quickstart-shapes for a built-in model.",
        trl="required",
        swift="required",
        names=("model_name_or_path", "model_id_or_path"),
        path=PathKind("E301"),
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
        "Where to find model and data set ids without a prefix. true: on the Hugging Face hub; false: on "
        "ModelScope.",
        swift="false",
        resume="free",
    )
    trust_remote_code: bool = option(
        False,
        "Run the Python code that comes with a model. A model from a hub then needs model_revision, as a "
        "full commit hash.",
        trl="false",
    )
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "dtype of the forward pass. The weights that the optimizer updates are always float32. auto: "
        "bfloat16 on a GPU that supports it, else float32. float16 is refused.",
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
        "Turn dropout off, so that the policy always gives a token the same probability. With dropout, "
        "the guards that compare probabilities are off.",
        trl="false",
    )
    attn_impl: Literal["auto", "flash_attn", "sdpa", "flex", "eager"] = option(
        "auto",
        "Attention implementation for training. sdpa: torch's own, one row at a time (C code on a CPU). "
        "flex: one compiled kernel on a GPU. flash_attn: the package flash-attn. eager: plain matrix "
        "products. auto: flex where the GPU supports it, else sdpa.",
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
        "Kernels for attention, the head and decoding steps. auto: C on a CPU with a compiler; compiled "
        "attention, liger-kernel and CUDA graphs on a GPU. torch: only the model's own modules and "
        "torch's operators, which is slower; use it to find out whether another kernel causes a problem.",
    )
    use_liger_kernel: Literal["auto", "true", "false"] = option(
        "auto",
        "Use the norms and gated layers of the package liger-kernel. auto: on a GPU, if the package is "
        "installed and supports the model.",
        trl="false",
        swift="false",
        words={"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"},
        alone="true",
    )
    gradient_checkpointing: Literal["auto", "true", "false", "selective"] = option(
        "auto",
        "Recompute activations in the backward pass to save memory. true: whole layers, about a third "
        "slower. selective: everything except matrix products and attention (those that run in C on a CPU "
        "are recomputed too). auto: only if memory requires it.",
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
        names=("activation_checkpointing",),
        alone="true",
        resume="free",
    )
    activation_offloading: bool = option(
        False,
        "Keep activations in CPU memory between the forward and the backward pass; only for GPUs.",
        resume="free",
    )


class TunerOptions(Options):
    """Adapters."""

    adapters: str | None = option(
        None,
        "Directory of a saved LoRA adapter to continue training; its rank, alpha and modules do not "
        "change. Giving this directory as model has the same effect.",
        swift="none",
        resume="free",
        path=PathKind("E380"),
    )
    ref_adapters: str = option(
        "start",
        "Reference of the KL term when adapters is set and beta is above 0. start: the adapter as it was "
        "when the run began; base: the model with the adapter off; or the directory of another adapter of "
        "the same shape.",
        trl="start",
        swift="base",
        rlhf="base",
        path=PathKind("E384"),
    )

    tuner_type: Literal["full", "lora"] = option(
        "full",
        "What is trained. full: all weights; lora: low-rank adapters, while the weights of the model are "
        "frozen.",
        trl="full",
        swift="lora",
        rlhf="lora",
        names=("train_type", "sft_type", "use_peft"),
        switches={"use_peft": ("lora", "full")},
    )
    # TRL trains every weight of a vision language model. Its peft adapts q_proj and v_proj there, which only
    # the language model has, and engines apply adapters to that alone; so LoRA leaves out what sees, too.
    freeze_vit: bool = option(
        ...,
        "Do not train the vision tower of a vision language model. With tuner_type full, its weights stay; "
        "with lora, all-linear gives it no adapter. By default only LoRA freezes it: TRL trains all weights "
        "in full, and peft's default adapters are on the language model alone.",
        rule="true with tuner_type lora, else false",
        usual=False,
        trl="false",
        swift="true",
        rlhf=True,
    )
    freeze_aligner: bool = option(
        ...,
        "Do not train what joins the vision tower of a vision language model to its language model (the "
        "merger), as freeze_vit does not train the tower.",
        rule="true with tuner_type lora, else false",
        usual=False,
        trl="false",
        swift="true",
        rlhf=True,
    )
    freeze_llm: bool = option(
        False,
        "Do not train the language model of a vision language model, with its embedding and its head.",
        trl="false",
        swift="false",
    )
    lora_rank: int = option(
        16,
        "Rank of the two matrices of an adapter.",
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
        "Dropout on the input of the adapters; no effect while disable_dropout is on, which is the default.",
        ge=0,
        lt=1,
        why="It is the probability that an input of the adapter is dropped.",
        trl="0.05",
        swift="0.05",
        read_if=only_with("tuner_type", "lora"),
    )
    target_modules: list[str] = option(
        ["all-linear"],
        "Modules that get an adapter, given by the ends of their names; all-linear: all linear layers "
        "except the head and those that freeze_vit, freeze_aligner and freeze_llm leave out.",
        trl="peft's",
        swift="all-linear",
        names=("lora_target_modules",),
        read_if=only_with("tuner_type", "lora"),
    )
    modules_to_save: list[str] = option(
        [],
        "Modules that are trained completely in addition to the adapters, given by the ends of their names.",
        trl="none",
        swift="none",
        names=("lora_modules_to_save",),
        read_if=only_with("tuner_type", "lora"),
    )
    use_rslora: bool = option(
        False,
        "Scale the adapters by lora_alpha / sqrt(lora_rank) instead of lora_alpha / lora_rank.",
        trl="false",
        swift="false",
        read_if=only_with("tuner_type", "lora"),
    )
    use_dora: bool = option(
        False,
        "Train the magnitude and the direction of each weight column separately (DoRA).",
        trl="false",
        swift="false",
        read_if=only_with("tuner_type", "lora"),
    )

    @property
    def frozen_parts(self) -> frozenset[Part]:
        """Return the parts of a model that sees images which the options freeze."""
        return frozenset(part for part in PARTS if getattr(self, f"freeze_{part}"))


_DTYPE_WORDS = {
    "bf16": "bfloat16",
    "torch.bfloat16": "bfloat16",
    "fp32": "float32",
    "torch.float32": "float32",
    "fp16": "float16",
    "torch.float16": "float16",
}


class QuantizationOptions(Options):
    """Quantization (QLoRA): train an adapter on 4-bit or 8-bit weights."""

    quant_bits: Literal["4", "8"] | None = option(
        None,
        "Number of bits to which the linear layers of the frozen model are quantized when it is loaded; "
        "adapters, embedding and head are not quantized. Needs tuner_type lora and pip install "
        "'covey[qlora]'.",
        trl="not set",
        swift="not set",
    )
    quant_method: Literal["bnb", "hqq", "eetq", "quanto", "gptq", "awq", "fp8"] | None = option(
        ...,
        "Quantization method: bnb (bitsandbytes). ms-swift has other methods, which covey refuses.",
        rule="bnb if quant_bits is set",
        trl="bitsandbytes",
        swift="not set",
        words={"bitsandbytes": "bnb"},
    )
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = option(
        "nf4",
        "Data type of 4-bit weights. nf4: 16 values chosen for normally distributed weights; fp4: "
        "floating-point numbers of 4 bits.",
        trl="nf4",
        swift="nf4",
        read_if=only_with("quant_bits", "4"),
    )
    bnb_4bit_use_double_quant: bool = option(
        True,
        "Quantize the scales of 4-bit weights too: 4.13 instead of 4.5 bits per weight.",
        trl="false",
        swift="true",
        names=("use_bnb_nested_quant",),
        read_if=only_with("quant_bits", "4"),
    )
    bnb_4bit_compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "dtype in which layers with 4-bit weights compute. auto: the torch_dtype.",
        trl="torch_dtype's",
        swift="torch_dtype's",
        words=_DTYPE_WORDS,
        read_if=only_with("quant_bits", "4"),
    )
    bnb_4bit_quant_storage: Literal["uint8", "float16", "bfloat16", "float32"] = option(
        "uint8",
        "dtype of the tensors that store the bytes of 4-bit weights. It does not change any result.",
        trl="torch_dtype's",
        swift="not set",
        words={"torch.uint8": "uint8", **_DTYPE_WORDS},
        read_if=only_with("quant_bits", "4"),
    )
