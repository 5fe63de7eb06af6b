"""Codes of what is wrong with options, the batch, the algorithm, or the directory of a run."""

from __future__ import annotations

CONFIGURATION: tuple[tuple[str, str, str], ...] = (
    # -- options and values
    (
        "E101",
        "Unknown option",
        "A misspelt option that is accepted changes nothing, and the run trains with a value nobody asked "
        "for.",
    ),
    (
        "E102",
        "Option of another tool or version",
        "The option is known from TRL or ms-swift, and this version has nothing that it could change; "
        "ignoring it would give another run than the one it describes.",
    ),
    (
        "E103",
        "Value of the wrong type",
        "The words after the option are no value of its type, so there is nothing to run with.",
    ),
    (
        "E104",
        "Value that is not among the choices",
        "The option takes one of a few words; any other would only fail later, with the model already in "
        "memory.",
    ),
    (
        "E105",
        "Required option not given",
        "A model, a data set and at least one reward are what makes a run; none of them has a sensible "
        "default.",
    ),
    (
        "E106",
        "Option given twice with different values",
        "Two names or two places say different things about one option, and neither is clearly the later "
        "word.",
    ),
    (
        "E107",
        "Configuration file that cannot be read",
        "The YAML file is absent or is not a mapping of options, so the run it describes is unknown.",
    ),
    (
        "E108",
        "Stray word on the command line",
        "A word belongs to no option; most often a value too many or a lost pair of quotes.",
    ),
    (
        "E109",
        "Value out of range",
        "The option has a range outside of which the computation is undefined or does nothing.",
    ),
    (
        "E110",
        "Temperature that does not sample",
        "At temperature 0 sampling is greedy: all completions of a prompt are equal, so are their rewards, "
        "and every advantage is 0. Nothing is learnt.",
    ),
    (
        "E111",
        "Options that contradict each other",
        "One of the options would be ignored because of the other.",
    ),
    (
        "E112",
        "Unknown verb",
        "The first word after covey says what to do, and this version does no such thing.",
    ),
    ("E113", "Unknown code", "A code that is not in the list has never been printed by this version."),
    (
        "E114",
        "Another training method",
        "covey trains with GRPO; another method has another loss and other data.",
    ),
    (
        "E115",
        "Option that needs another one",
        "Alone it cannot do what it says, and a run without it is another run.",
    ),
    (
        "E116",
        "Package not installed",
        "The option rests on a library that is not in this environment.",
    ),
    (
        "E117",
        "Option for a GPU",
        "There is no GPU for it to work on; the run would do something else than was asked for.",
    ),
    (
        "E118",
        "Kernel that does not fit",
        "Other kernels would run in its place, slower and without a word, or the first step would fail.",
    ),
    (
        "E119",
        "Library with a known fault",
        "This version of the library has a published fault in something that a run does with it.",
    ),
    # -- batch
    (
        "E201",
        "Group of fewer than two completions",
        "The advantage of a completion is its reward against the others of its prompt. With one there is "
        "nothing to compare, every advantage is 0 and no weight moves.",
    ),
    (
        "E202",
        "Groups do not fill the rollout",
        "A rollout holds whole groups only: processes x per_device_train_batch_size x steps_per_generation "
        "must be a multiple of num_generations. A group may span processes and forward passes.",
    ),
    (
        "E203",
        "steps_per_generation and generation_batch_size disagree",
        "Both say how large a rollout is, and they say different things.",
    ),
    (
        "E204",
        "generation_batch_size does not divide over the processes",
        "Each process takes the same number of full forward passes per rollout, so generation_batch_size "
        "must be a multiple of processes x per_device_train_batch_size.",
    ),
    (
        "E205",
        "Optimizer step straddles two rollouts",
        "If steps_per_generation is no multiple of gradient_accumulation_steps, some steps mix samples of "
        "two versions of the policy.",
    ),
    (
        "E206",
        "Several rollouts for one optimizer step",
        "Nothing is updated between these rollouts, so together they are one larger rollout; with "
        "num_iterations above 1 the further passes would only repeat the same gradient.",
    ),
    (
        "E207",
        "Data set smaller than one rollout",
        "A rollout takes a fixed number of different prompts. With fewer in the data set no step would "
        "ever run, and the run would end at once without a word.",
    ),
    (
        "E208",
        "Batch count out of range",
        "Every count of the batch is a whole number from 1 to 1,000,000,000.",
    ),
    (
        "E209",
        "More processes than GPUs",
        "Two processes on one GPU compete for its memory, and the communication library refuses them.",
    ),
    ("E210", "No optimizer step", "The run would end before its first optimizer step."),
    (
        "E211",
        "Memory too small for the states of the run",
        "Weights, gradients and optimizer state are held whatever the batch is. A run that does not fit is "
        "ended by the system or the driver in the middle of a step, with no word of covey's.",
    ),
    (
        "E212",
        "Word of covey plan",
        "`covey train` runs on the machine it is started on, and --deepspeed or --fsdp says how it splits "
        "weights and optimizer state. Another machine can be planned for, but not run on.",
    ),
    (
        "E213",
        "Offload that the ZeRO stage has not",
        "DeepSpeed takes from the GPU what it has cut into parts: the optimizer from stage 1 on, weights in "
        "stage 3 alone. In a lower stage the setting is refused or does nothing.",
    ),
    (
        "E214",
        "Engine that does not divide the GPUs",
        "Colocated vLLM runs in the training processes, so its engines have to take up all of them, each "
        "with whole attention heads.",
    ),
    (
        "E215",
        "Share of the engine too small",
        "vLLM puts its weights and then its cache into its share of the GPU; where the weights leave no room "
        "it does not start.",
    ),
    (
        "E217",
        "DeepSpeed file that cannot be read",
        "The plan would be for another layout than the one that the file is meant to say.",
    ),
    (
        "E218",
        "ZeRO stage or device that DeepSpeed has not",
        "DeepSpeed refuses the file at its start; taken for something near it, the plan would be for another "
        "run.",
    ),
    (
        "E219",
        "DeepSpeed file that says something else",
        "The file and the command describe different runs, and covey does not choose between them. DeepSpeed "
        "refuses a batch whose numbers do not agree.",
    ),
    (
        "E220",
        "DeepSpeed setting that covey does not run with",
        "Without the setting it would be another run than the file describes. With it, covey's gradients, "
        "checkpoints and resumes have not been tested.",
    ),
    # -- algorithm
    (
        "E331",
        "Parts of an algorithm that exclude each other",
        "Together the options mean nothing, or one of them would be ignored: the run would be another one "
        "than the command says.",
    ),
    (
        "E332",
        "Cap of cispo at or below 1",
        "cispo multiplies every token with its ratio, at most epsilon_high. A cap below 1 cuts the weight of "
        "every token alike and leaves nothing of the ratio.",
    ),
    (
        "E333",
        "Selection of groups where their spread decides nothing",
        "Groups whose rewards are equal are left out because they teach nothing. Where they do, or where "
        "nothing can take their place, leaving them out would train something else than was asked for.",
    ),
    # -- output and resume
    (
        "E401",
        "Output directory holds a run",
        "Two runs in one directory mix their metrics and checkpoints, and the older one is lost bit by bit.",
    ),
    (
        "E402",
        "Output directory is not empty",
        "The directory holds files that are no run; a run writes into a directory of its own.",
    ),
    (
        "E403",
        "Output directory cannot be written",
        "A run whose results cannot be saved is a run for nothing.",
    ),
    (
        "E404",
        "Nothing to resume from",
        "Starting anew where a continuation was asked for would silently throw the progress away.",
    ),
    (
        "E405",
        "Resume with changed options",
        "The changed options alter samples, gradients or learning rates, so the steps after the resume "
        "would not be those of the run that was stopped.",
    ),
    ("E406", "Nothing to replay", "The directory has no rollouts to train on."),
    (
        "E407",
        "Disk too small for the checkpoints",
        "A checkpoint that does not fit stops the run hours later, with its progress unsaved.",
    ),
    (
        "E408",
        "Nothing to examine",
        "The doctor reads what a run has written; there is nothing here that it knows.",
    ),
    ("E409", "Records that cannot be read", "Without the steps of a run nothing can be said of it."),
)
