"""Codes of what is wrong with options, the batch, the algorithm, or the directory of a run."""

from __future__ import annotations

CONFIGURATION: tuple[tuple[str, str, str], ...] = (
    # -- options and values
    (
        "E101",
        "Unknown option",
        "If a misspelled option were accepted, the run would train without the value that you meant.",
    ),
    (
        "E102",
        "Option of another tool or version",
        "The option is known from TRL or ms-swift, but this version has nothing that it could change. If "
        "it were ignored, the run would differ from the one that the command describes.",
    ),
    (
        "E103",
        "Value of the wrong type",
        "The value does not have the option's type or is outside of its range, so covey cannot use it.",
    ),
    (
        "E104",
        "Value that is not among the choices",
        "The option takes only certain values; any other value would fail later, when the model is "
        "already in memory.",
    ),
    (
        "E105",
        "Required option not given",
        "A run needs a model, a data set and at least one reward; none of them has a sensible default.",
    ),
    (
        "E106",
        "Option given twice with different values",
        "Two names or two places give different values for one option, and it is not clear which one counts.",
    ),
    (
        "E107",
        "Configuration file that cannot be read",
        "The YAML file does not exist or is not a mapping of options, so the run that it describes is "
        "unknown.",
    ),
    (
        "E108",
        "Unexpected word on the command line",
        "A word does not belong to any option. If it were ignored, a part of a value might be lost; most "
        "often there is one value too many, or quotes are missing.",
    ),
    (
        "E109",
        "Value out of range",
        "Outside of its range an option has no meaning or no effect.",
    ),
    (
        "E110",
        "Greedy sampling",
        "Where only the most probable token can be drawn (temperature 0, top_k 1, min_p 1), all completions "
        "of a prompt are equal, so their rewards are equal, and every advantage is 0. The model learns "
        "nothing.",
    ),
    (
        "E111",
        "Options that contradict each other",
        "One of the options would be ignored because of the other.",
    ),
    (
        "E112",
        "Unknown command",
        "The first word after covey is the command, and this version has no such command.",
    ),
    ("E113", "Unknown code", "A code that is not in the list has never been printed by this version."),
    (
        "E114",
        "Another training method",
        "covey trains with GRPO only; other methods have other losses and other data.",
    ),
    (
        "E115",
        "Option that needs another one",
        "With the other options as they are, this one cannot do what it says, so the run would differ "
        "from the one you asked for.",
    ),
    (
        "E116",
        "Package not installed",
        "The option needs a library that is not installed in this environment.",
    ),
    (
        "E117",
        "Option for a GPU",
        "The option needs a GPU. Without one the run would differ from the one you asked for.",
    ),
    (
        "E118",
        "Kernel that cannot be used",
        "Other, slower kernels would be used without a message, or the first step would fail.",
    ),
    (
        "E119",
        "Library with a known fault",
        "This version of the library has a published bug in a function that the run uses.",
    ),
    (
        "E120",
        "Sampling filters on an engine that does not record the kept tokens",
        "The loss uses the probability of a token among those that top_p, top_k and min_p kept, so the "
        "engine has to report them. With probabilities over the whole vocabulary, the ratio of new to old "
        "probabilities would not be 1 before the first update.",
    ),
    # -- batch
    (
        "E209",
        "More processes than GPUs",
        "Two processes on one GPU compete for its memory, and the communication library does not allow it.",
    ),
    (
        "E211",
        "Memory too small for the model states",
        "Weights, gradients and optimizer state need memory whatever the batch size is. If they do not "
        "fit, the system or the driver ends the run in the middle of a step, without a message of covey.",
    ),
    (
        "E212",
        "Option of covey plan only",
        "`covey train` runs on the machine on which it is started, and --deepspeed or --fsdp sets how it "
        "splits weights and optimizer state. covey can plan for another machine, but not run on it.",
    ),
    (
        "E213",
        "Offload that the ZeRO stage does not support",
        "DeepSpeed can move only states off the GPU that it has partitioned: the optimizer from stage 1 "
        "on, weights only in stage 3. In a lower stage the setting is refused or has no effect.",
    ),
    (
        "E214",
        "Engine size that does not divide the GPUs of a machine",
        "Colocated vLLM runs in the training processes, so its engines must use all processes of each "
        "machine, each with whole attention heads.",
    ),
    (
        "E215",
        "vLLM's share of the memory too small",
        "vLLM uses its share of the GPU memory first for its weights and then for its cache; if the "
        "weights leave no room for the cache, it does not start.",
    ),
    (
        "E217",
        "DeepSpeed file that cannot be read",
        "Without the file, the plan would be for another layout than the one that the file describes.",
    ),
    (
        "E218",
        "ZeRO stage or device that DeepSpeed does not have",
        "DeepSpeed refuses the file when it starts; if covey used a similar setting instead, the plan "
        "would be for another run.",
    ),
    (
        "E219",
        "DeepSpeed file that contradicts the command",
        "The file and the command describe different runs, and covey does not choose between them. "
        "DeepSpeed also refuses a batch whose numbers do not agree.",
    ),
    (
        "E220",
        "DeepSpeed setting that covey does not support",
        "If covey ignored the setting, the run would differ from what the file describes; with the "
        "setting, gradients, checkpoints and resuming are untested.",
    ),
    # -- algorithm
    (
        "E332",
        "Cap of cispo at or below 1",
        "cispo multiplies every token by its ratio, limited to epsilon_high. A cap of 1 or below cuts the "
        "weights of almost all tokens to the same value, so the ratio has no effect.",
    ),
    # -- output and resume
    (
        "E401",
        "Output directory holds a run",
        "Two runs in one directory mix their metrics and checkpoints, and the older run is gradually "
        "overwritten.",
    ),
    (
        "E402",
        "Output directory is not empty",
        "A run writes and deletes files in its directory, so it needs one without other files.",
    ),
    (
        "E403",
        "Output directory cannot be written",
        "The results of the run could not be saved.",
    ),
    (
        "E404",
        "Nothing to resume from",
        "You asked to continue a run; a new start would lose its progress without a message.",
    ),
    (
        "E405",
        "Resume with changed options",
        "The changed options affect samples, gradients or learning rates, so the steps after the resume "
        "would differ from those of the stopped run.",
    ),
    (
        "E406",
        "Rollouts that cannot be replayed",
        "The run would train on these rollouts, so each must be complete and as large as its batch.",
    ),
    (
        "E407",
        "Disk too small for the checkpoints",
        "The run would stop hours later at a checkpoint that does not fit, and its progress would be lost.",
    ),
    (
        "E408",
        "Nothing to examine",
        "`covey doctor`, `covey mismatch` and `covey replay` read what a run writes. That is not here.",
    ),
    (
        "E409",
        "Records that cannot be read",
        "Without the recorded steps of a run, nothing can be said about it.",
    ),
)
