"""The codes of the model that no other part uses."""

from __future__ import annotations

from covey.codes import Code

CODES = (
    Code(
        code="E311",
        title="Not a causal language model",
        why="covey trains decoder-only language models of transformers, which generate text token by token.",
    ),
    Code(
        code="E317",
        title="Adapter target that matches nothing",
        why="If the target were ignored, that part of the model would not be trained, and no message "
        "would say so.",
    ),
    Code(
        code="E318",
        title="Code that comes with a model",
        why="The model comes with its own Python code, which would run with all of your permissions.",
    ),
    Code(
        code="E319",
        title="Data type that the device does not support",
        why="The forward pass would fail or be emulated at about a tenth of the speed, or gradients "
        "would be rounded to 0.",
    ),
    Code(
        code="E320",
        title="Weights that are not safetensors",
        why="Other weight formats can execute code when they are loaded.",
    ),
    Code(
        code="E323",
        title="Prompt that starts or ends differently than in training",
        why="The prompt must end with the assistant header and start with exactly one BOS token, as "
        "in the model's training. Otherwise the model continues the user's message or writes the "
        "header itself, and the run trains that.",
    ),
    Code(
        code="E373",
        title="Model with quantized weights",
        why="covey can train adapters on weights that bitsandbytes has quantized (QLoRA). It cannot "
        "compute gradients through weights of other methods, such as GPTQ, AWQ or FP8.",
    ),
    Code(
        code="E374",
        title="Token without a row in the embedding",
        why="A token id that is not below the number of embedding rows has no vector: the first text "
        "with this token would stop the run.",
    ),
    Code(
        code="E385",
        title="Weights in sharded files of another trainer",
        why="Such shards are pickled files, and each holds only part of the weights; covey reads "
        "complete weights as safetensors.",
    ),
    Code(
        code="E386",
        title="Quantization that covey does not support",
        why="covey quantizes the linear layers of a frozen model to 4 or 8 bits with bitsandbytes, "
        "while it loads the model's files. It has no other method, and it does not change weights "
        "that are already quantized.",
    ),
    Code(
        code="W102",
        title="bfloat16 on CPU",
        why="Most CPUs emulate bfloat16: it is no faster than float32 there and less exact.",
    ),
    Code(
        code="W109",
        title="Prompts without the chat template",
        why="The prompt column contains text, which is passed to the model unchanged. A model trained "
        "on chats expects its chat template.",
    ),
    Code(
        code="W112",
        title="Small learning rate for a small model",
        why="Learning rates for models of billions of parameters change a model of a few million "
        "parameters too little to see an effect.",
    ),
    Code(
        code="W118",
        title="End of a turn that is not a single token",
        why="A completion ends at an end token. An end mark that consists of several tokens is not "
        "recognized, so a model that writes it continues up to the maximum length.",
    ),
    Code(
        code="W123",
        title="Chat template that does not write the BOS token",
        why="Many models were trained with a BOS token in front of every text, and write worse "
        "without it. covey adds no token to what a chat template writes, so the template has to "
        "write it.",
    ),
    Code(
        code="W151",
        title="Tensors that are not loaded",
        why="The model that config.json describes does not contain them, so they are not part of the "
        "training.",
    ),
)
