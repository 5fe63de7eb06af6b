"""Codes of what is wrong before a run starts: its processes, the files of its model, its forecasts."""

from __future__ import annotations

START: tuple[tuple[str, str, str], ...] = (
    (
        "E370",
        "Variables of a launcher that do not fit",
        "From these variables each process learns how many there are and which one it is. With a wrong one "
        "the run would wait for processes that nobody starts, or compute with another number of them.",
    ),
    (
        "E372",
        "Weights that do not fit config.json",
        "A tensor that is missing would start from random numbers, and one of another shape cannot be "
        "loaded: the run would train another model than the one that was saved.",
    ),
    (
        "E373",
        "Model that is stored quantized",
        "covey trains adapters on weights that bitsandbytes has quantized (QLoRA). It cannot compute "
        "gradients through weights of other methods, such as GPTQ, AWQ or FP8.",
    ),
    (
        "E374",
        "Token without a row in the embedding",
        "A token id at or above the number of rows of the embedding has no vector: the first text that "
        "contains the token would stop the run.",
    ),
    (
        "E375",
        "Processes that do not meet",
        "The processes of a run meet at the address of rank 0 before weights are loaded. Without all of them "
        "there is no run.",
    ),
    (
        "E376",
        "Object of a program that is not here",
        "The model or the rows were an object of a Python program. config.yaml holds their name and checksum "
        "alone, so only a program can give them.",
    ),
    (
        "E377",
        "Object that cannot be used",
        "covey trains the object itself. Its checkpoints have to be loaded as the same model, with a "
        "tokenizer, and its rows have to be readable.",
    ),
    (
        "E379",
        "Sharding that only the launcher's file has",
        "covey reads the number of processes from accelerate's file, but not how the model is split, which "
        "is an option of the command. Without it every process would hold the whole model.",
    ),
    (
        "E380",
        "Adapter that cannot be read",
        "A run that starts from an adapter needs its configuration, and its weights as safetensors; a "
        "pickled file can run code when it is read.",
    ),
    (
        "E381",
        "Adapter of another kind",
        "What an adapter has beside the two matrices of LoRA would be left out, and the run would start from "
        "another model than the one that was saved.",
    ),
    (
        "E382",
        "Option that the adapter decides",
        "Rank, scale and modules of a saved adapter are fixed; with other values its weights would give "
        "another model.",
    ),
    (
        "E383",
        "Adapter that does not fit the model",
        "Without a place for each of its tensors the run would start from another model than the one that "
        "was trained.",
    ),
    (
        "E384",
        "Reference that cannot be held",
        "The reference of a run that starts from an adapter is the same model, with other weights in that "
        "adapter or with the adapter off.",
    ),
    (
        "E385",
        "Weights in the shards of a trainer",
        "Such shards are pickled, and each holds a part of the weights; covey reads whole weights as "
        "safetensors.",
    ),
    (
        "E386",
        "Quantization that covey does not have",
        "covey quantizes the linear layers of a frozen model with bitsandbytes, to 4 or 8 bits, as it reads "
        "the model's files. It has no other method, and does not change weights that are stored quantized.",
    ),
    (
        "E387",
        "Quantized weights with full training or sharding",
        "Quantized weights cannot be trained and cannot be split: each process holds all of them, frozen, "
        "and trains an adapter beside them.",
    ),
    (
        "E378",
        "Ranks that do not agree",
        "Each rank computes a part of every step. With other options, data, model files or versions the "
        "parts do not belong together: the ranks would wait for each other, or average what is not one "
        "gradient.",
    ),
    (
        "E388",
        "Ray that cannot be used",
        "With --launcher ray each rank is started by an actor of Ray. Without a Ray that accepts these "
        "actors the run cannot start.",
    ),
    (
        "E389",
        "Too few GPUs or CPUs in Ray",
        "Each rank is one actor with a GPU of its own, or a CPU where Ray has no GPUs. Ray would wait "
        "for the missing ones forever.",
    ),
    (
        "W152",
        "Adapter of another base",
        "An adapter is trained on one base. On another one it gives a model that nobody trained, even "
        "where every tensor fits.",
    ),
    (
        "W151",
        "Tensors that are not loaded",
        "The model that config.json describes has no place for them, so they take no part in the training.",
    ),
    (
        "W153",
        "Checks switched off",
        "Without guards a fault of covey, a library or the machine trains on unseen. Without the watchdog a "
        "run that hangs holds its devices until somebody ends it.",
    ),
    (
        "W150",
        "Forecast ignored",
        "The forecast is an estimate. If it is right, the run ends out of memory or with a full disk.",
    ),
)
