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
        "A resumed run goes on in these files: what it recorded after its checkpoint moves aside, and each "
        "step stands once. That needs every line to be readable. Moved away, the file stays as it is, and "
        "the run goes on in a new one.",
    ),
    (
        "E412",
        "Name that a run needs is taken",
        "The run would overwrite what stands there, or stop with its progress unsaved.",
    ),
    (
        "E413",
        "Neither a checkpoint nor a model",
        "What is wrong with a checkpoint is found in its manifest and in the headers of its files. Here "
        "there are none to compare.",
    ),
    (
        "E414",
        "Run directory that machines do not share",
        "Each rank writes its part of a checkpoint to the run directory. With a separate directory on each "
        "machine no checkpoint would be complete.",
    ),
    (
        "E418",
        "Checkpoint of another trainer",
        "The state of its optimizer is pickled, which can run code when it is read, so it cannot be taken "
        "over. A new run can start from its weights.",
    ),
    (
        "E419",
        "Another reference than at the start",
        "The KL term would compare with another model than before the stop, so the steps after it would not "
        "be those of the run that was stopped.",
    ),
    (
        "W162",
        "Run started again",
        "A process of the run was killed or failed, and torchrun has started all of them again. The steps "
        "after the newest checkpoint are computed again.",
    ),
    (
        "W161",
        "Options of the stopped run unknown",
        "A resume compares its options with them, so that samples, gradients and learning rates go on as "
        "they were. Here nothing was compared.",
    ),
    (
        "W160",
        "Checkpoint passed over",
        "The steps since the older checkpoint are taken again. The newer one stays where it is until a new "
        "checkpoint of its step replaces it.",
    ),
    (
        "F130",
        "Run directory that cannot be written",
        "What cannot be recorded or saved would be lost, so the run stops. Checkpoints and records that were "
        "there stay as they are.",
    ),
    (
        "F131",
        "A process of the run failed",
        "The run cannot go on without it, so all of its processes end. What was recorded and saved stays.",
    ),
    (
        "F132",
        "Run directory deleted or replaced",
        "The run stops instead of writing into a new directory of the same name, which would hold a part of "
        "its records and no checkpoint.",
    ),
    (
        "F133",
        "A process of the run is gone",
        "The run cannot go on without it, so all of its processes end. What was recorded and saved stays.",
    ),
    (
        "F134",
        "A process of the run is stopped",
        "The others would wait for it without an end, and hold their devices. All processes end, the stopped "
        "one too. What was recorded and saved stays.",
    ),
    (
        "F135",
        "Out of memory",
        "The same step would fail again, so the run needs less memory to go on. All of its processes end. "
        "What was recorded and saved stays.",
    ),
    (
        "F136",
        "Machine of the run does not answer",
        "The other ranks would wait for it forever and keep their devices, so all processes that can be "
        "reached are ended. What was recorded and saved stays.",
    ),
)
