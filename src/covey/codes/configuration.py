"""Codes of what is wrong, or odd, with a configuration or an input."""

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
        "This version of the library has a published fault in something that a run does with it, "
        "such as reading files that others wrote.",
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
        "Memory too small for the run",
        "A run that does not fit is ended by the system or the driver in the middle of a step, with no word "
        "of covey's.",
    ),
    (
        "E212",
        "Word of covey plan",
        "`covey train` runs on the machine it is started on, in one process or with DDP, each process with "
        "the whole model. Another machine, ZeRO and offloading can be planned and not run.",
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
        "E216",
        "Asynchronous engine on the training GPUs",
        "Sampling beside training needs GPUs of its own; colocated, the two take turns.",
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
        "The file and the command are of two runs, and only one of them can be planned. DeepSpeed refuses a "
        "batch whose numbers do not agree.",
    ),
    # -- model, data, rewards
    (
        "E301",
        "Model that cannot be read",
        "Without weights, a configuration and a tokenizer there is nothing to train.",
    ),
    ("E302", "Data file not found or not readable", "A run on part of its data is another run."),
    ("E303", "Column missing", "A prompt or a reward needs a column that the data set does not have."),
    (
        "E304",
        "No prompt short enough",
        "Every prompt is longer than the limit and would be left out, so there is nothing to sample from.",
    ),
    (
        "E305",
        "Context too short",
        "Prompt and completion together must fit into the model's context; beyond it positions are "
        "undefined and the text turns to noise.",
    ),
    (
        "E306",
        "Unknown reward",
        "A reward that does not exist cannot score; better now than after the first rollout.",
    ),
    ("E307", "Number of reward weights", "Each reward has exactly one weight, in the same order."),
    (
        "E308",
        "Rewards that cannot differ",
        "If every weight is 0 every total is 0, every advantage is 0 and no weight of the model moves.",
    ),
    ("E309", "No usable row", "The data set has no row with a prompt, so there is nothing to sample from."),
    (
        "E310",
        "Gold answers that cannot be read",
        "A row whose gold answer cannot be read scores nothing, so the model learns nothing from it.",
    ),
    (
        "E311",
        "Model that is no causal language model",
        "GRPO samples text token by token and trains on it; other kinds of model have no such head.",
    ),
    (
        "E312",
        "Images, audio or video",
        "This version trains on text. Leaving the other half of the input out would train another task.",
    ),
    (
        "E313",
        "Chat template",
        "Messages become tokens through a template; without the right one the model reads another language.",
    ),
    (
        "E314",
        "Reward that cannot be loaded",
        "A reward that is not there cannot score; better now than after the first rollout.",
    ),
    (
        "E315",
        "Reward that cannot be called",
        "The function asks for an argument that neither covey nor a column of the data gives.",
    ),
    (
        "E316",
        "Reward that failed its trial",
        "Before weights are loaded each reward scores two rows, one with the gold answer and one empty. "
        "What fails there fails in every rollout, and nothing is ever scored 0 for it.",
    ),
    (
        "E317",
        "Adapter target that matches nothing",
        "A target that is ignored leaves that part of the model untrained without a word.",
    ),
    (
        "E318",
        "Code that comes with a model",
        "The model brings Python code of its own, which would run with all of your rights.",
    ),
    (
        "E319",
        "Data type that the device lacks",
        "The forward pass would fail, or be emulated at a tenth of the speed.",
    ),
    (
        "E320",
        "Weights that are not safetensors",
        "Other formats of weights can run code when they are read.",
    ),
    (
        "E321",
        "Hub that does not give the files",
        "Without its files there is nothing to train, or nothing to train on.",
    ),
    (
        "E323",
        "Chat template that begins prompts otherwise",
        "The model answers where it was taught to: after the words that open its turn, in a text with one "
        "token at its start. After another beginning it writes on for the user, or opens the turn itself, "
        "and the run trains that.",
    ),
    (
        "E360",
        "Message that the chat template leaves out",
        "The model would be trained on prompts that lack a part of the data, and nothing would show it.",
    ),
    (
        "E361",
        "Tools that the chat template leaves out",
        "The model would be asked to use tools that it is never told of.",
    ),
    (
        "E362",
        "Unknown role of a message",
        "A turn of the assistant under another name would stand in the prompt, and with it the answer.",
    ),
    (
        "E363",
        "Preference pairs",
        "GRPO samples its own answers and scores them; a better and a worse answer give it no score.",
    ),
    (
        "E364",
        "Tools that cannot be read",
        "The chat template is given tools as a list of functions with names.",
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
    # -- warnings
    (
        "W101",
        "More processes than cores",
        "The processes take turns on the cores, so each step is slower, not faster.",
    ),
    (
        "W102",
        "bfloat16 on CPU",
        "Most CPUs emulate bfloat16: it is no faster than float32 there and less exact.",
    ),
    ("W103", "Learning rate 0", "The gradient is computed and then multiplied by 0: no weight moves."),
    (
        "W104",
        "Clipping bound within the clipping range",
        "delta below 1 + epsilon_high also bounds ratios that clipping leaves alone, which the two-sided "
        "clip is not meant to do.",
    ),
    ("W105", "Prompts left out", "Prompts longer than the limit are not trained on."),
    (
        "W106",
        "Many optimizer steps per rollout",
        "The later steps train on samples of a policy that is many updates old; clipping then discards "
        "much of them.",
    ),
    ("W107", "Warm-up longer than the run", "The learning rate never reaches the value that was asked for."),
    (
        "W108",
        "Option without effect",
        "What the option says is done anyway, or has nothing to act on here.",
    ),
    (
        "W109",
        "Prompts past the chat template",
        "The column prompt holds text, which goes to the model as it is. A model trained on chats expects "
        "its template around it.",
    ),
    (
        "W110",
        "Format that nobody asked for",
        "The reward format pays for <think> and <answer>. A model that is never told of them writes them by "
        "chance, and the reward stays 0.",
    ),
    (
        "W140",
        "Columns of bytes",
        "Columns are sent to rewards and recorded as JSON, which has no bytes.",
    ),
    (
        "W141",
        "Columns that the prompt has no place for",
        "A system message or tools reach the model through the chat template, and a prompt string has none.",
    ),
    ("W111", "Rows left out", "A row that cannot be used is not trained on; the others are."),
    (
        "W112",
        "Small learning rate for a small model",
        "Rates for models of billions of parameters move one of a few million too little to see.",
    ),
    (
        "W113",
        "Defaults of ms-swift",
        "The two commands have other defaults: `covey train` has covey's, `covey rlhf` those of ms-swift "
        "that decide the result.",
    ),
    (
        "W114",
        "Memory nearly full",
        "The forecast is an estimate, and other programs take memory too: a run this close to the limit may "
        "be ended in the middle of a step.",
    ),
    (
        "W115",
        "Library that nobody tried",
        "The tests have not run with so old a version of the library; names and defaults change between "
        "versions.",
    ),
    (
        "W117",
        "DeepSpeed setting left out of the forecast",
        "It changes what a GPU or the machine's memory holds, and the forecast counts without it.",
    ),
    (
        "W118",
        "End of a turn that is no token",
        "A completion ends at a token. A mark that is spelled out in several is never seen, so a model that "
        "learns to write it goes on behind it up to the longest length.",
    ),
    (
        "W122",
        "Unusual pair of options",
        "The two are from different recipes. What they do together is well defined, and what their authors "
        "did not test.",
    ),
    (
        "W124",
        "Reference that moves after the run",
        "The reference of the KL divergence is to follow the policy, and the run ends before it has moved: "
        "it is the run without that option.",
    ),
)
