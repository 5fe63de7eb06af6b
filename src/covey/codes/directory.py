"""Codes of the directory of a run, and of the processes that write to it."""

from __future__ import annotations

DIRECTORY: tuple[tuple[str, str, str], ...] = (
    (
        "E410",
        "Run directory in use",
        "Two runs that write to one directory mix their records and overwrite each other's checkpoints.",
    ),
    (
        "E411",
        "Records that a resume cannot read",
        "A resumed run continues these files: records after its checkpoint are moved to another file, so "
        "that each step appears once. For this, every line must be readable. If you move the file away, "
        "it stays unchanged, and the run writes a new one.",
    ),
    (
        "E412",
        "Name that the run needs is already used",
        "The run would overwrite what is there, or stop with its progress unsaved.",
    ),
    (
        "E413",
        "Neither a checkpoint nor a model",
        "A checkpoint has a manifest.json, a model has a config.json, and an adapter has an "
        "adapter_config.json. Without any of them there is nothing to load or to check.",
    ),
    (
        "E415",
        "Checkpoint that cannot be exported",
        "A model with damaged files or other numbers than those that were trained would be used without "
        "anyone noticing, so nothing was written.",
    ),
    (
        "E414",
        "Run directory that is not shared by all machines",
        "Each rank writes its part of a checkpoint to the run directory. If each machine has its own "
        "directory, no checkpoint is complete.",
    ),
    (
        "W164",
        "Records of the stopped run are missing",
        "Training continues unchanged, because its state is in the checkpoint. But plots, the doctor and "
        "trackers show only the steps in metrics.jsonl, and a rollout without its file cannot be read or "
        "replayed.",
    ),
    (
        "W163",
        "Reward function changed since the stopped run",
        "The rewards of the steps after the resume cannot be compared with those before it.",
    ),
    (
        "W162",
        "Run started again",
        "A process of the run was killed or failed, and torchrun restarted all of them. The steps after "
        "the newest checkpoint are computed again.",
    ),
    (
        "W160",
        "Newest checkpoint skipped, an older one is used",
        "The steps since the older checkpoint are repeated. The newer checkpoint stays where it is until "
        "a new one of the same step replaces it.",
    ),
    (
        "F130",
        "Run directory that cannot be written",
        "What cannot be recorded or saved would be lost, so the run stops. Existing checkpoints and "
        "records do not change.",
    ),
    (
        "F131",
        "A process of the run failed",
        "The run cannot continue without it, so all of its processes end. Everything recorded and saved "
        "so far remains.",
    ),
    (
        "F132",
        "Run directory deleted or replaced",
        "The run stops instead of writing to a new directory of the same name, which would contain only "
        "part of its records and no checkpoint.",
    ),
    (
        "F133",
        "A process of the run disappeared",
        "The run cannot continue without it, so all of its processes end. Everything recorded and saved "
        "so far remains.",
    ),
    (
        "F134",
        "A process of the run is paused",
        "The other processes would wait for it forever and keep their devices. All processes end, "
        "including the paused one. Everything recorded and saved so far remains.",
    ),
    (
        "F135",
        "Out of memory",
        "The same step would fail again, so the run needs less memory to continue. All of its processes "
        "end. Everything recorded and saved so far remains.",
    ),
    (
        "F136",
        "A machine of the run does not answer",
        "The other ranks would wait for it forever and keep their devices, so all processes that can be "
        "reached are ended. Everything recorded and saved so far remains.",
    ),
)
