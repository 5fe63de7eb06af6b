"""Codes of what is wrong before a run starts: its processes, the files of its model, its forecasts."""

from __future__ import annotations

START: tuple[tuple[str, str, str], ...] = (
    (
        "E370",
        "Launcher variables that do not match",
        "These variables tell each process how many processes there are and which one it is. If one is "
        "wrong, the run waits for processes that are never started, or computes with the wrong number.",
    ),
    (
        "E372",
        "Weights that do not match config.json",
        "A missing tensor would start from random numbers, and a tensor of another shape cannot be "
        "loaded: the run would not train the model that was saved.",
    ),
    (
        "E375",
        "Processes that cannot connect",
        "Before weights are loaded, the processes of a run connect at the address of rank 0. The run "
        "needs all of them.",
    ),
    (
        "E379",
        "Setting of accelerate that covey does not have",
        "`accelerate launch` hands on what its file says in environment variables. covey takes sharding from "
        "there; what it does not do it refuses, since the run would not be the one that the file describes.",
    ),
    (
        "W192",
        "accelerate was asked for several processes and started one",
        "Where its file says MULTI_CPU or NO, `accelerate launch` starts one process, whatever num_processes "
        "says. With one process instead of N, each step has an Nth of the completions.",
    ),
    (
        "W193",
        "Options taken from accelerate",
        "`accelerate launch` hands on what its file says in environment variables. covey takes these as its "
        "own options where the command does not set them.",
    ),
    (
        "E380",
        "Adapter that cannot be read",
        "A run that starts from an adapter needs the adapter's config file and its weights as "
        "safetensors; pickled files can execute code when they are loaded.",
    ),
    (
        "E381",
        "Unsupported kind of adapter",
        "covey loads only the two LoRA matrices. Anything else in the adapter would be dropped, and the "
        "run would not start from the saved model.",
    ),
    (
        "E382",
        "Option that is fixed by the adapter",
        "Rank, scale and modules of a saved adapter are fixed; with other values its weights would give "
        "another model.",
    ),
    (
        "E384",
        "Unsupported reference model",
        "In a run that starts from an adapter, the reference is the same model, with other weights in "
        "that adapter or with the adapter off.",
    ),
    (
        "E387",
        "Quantized weights with full training or sharding",
        "Quantized weights cannot be trained or split: each process holds all of them, frozen, and trains "
        "an adapter.",
    ),
    (
        "E378",
        "Ranks that do not agree",
        "Each rank computes part of every step. If their options, data, model files or versions differ, "
        "the parts do not belong together: the ranks would hang, or average gradients of different things.",
    ),
    (
        "W153",
        "Checks switched off",
        "Without guards, an error of covey, a library or the machine goes unnoticed. Without the "
        "watchdog, a run that hangs keeps its devices until somebody ends it.",
    ),
    (
        "W150",
        "Memory or disk forecast ignored",
        "The forecast is an estimate. If it is right, the run runs out of memory or disk space.",
    ),
)
