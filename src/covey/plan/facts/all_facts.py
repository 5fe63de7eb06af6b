"""Everything that the checks need to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from covey.plan.facts.data import (
    DataProblem,
    EvalSet,
    HubProblem,
    LeftOut,
    MissingColumn,
    PassRateFacts,
    UnreadableFile,
)
from covey.plan.facts.model import NO_DETAILS, AdapterFacts, FaultDetails, ModelFault, ModelSizes, TargetFacts
from covey.plan.facts.rewards import (
    GoldFacts,
    JudgeFacts,
    RewardModelFacts,
    SandboxFacts,
)
from covey.plan.facts.run import OutputDirState, RayFacts, ResumeFacts, RunOwner
from covey.plan.facts.servers import ServerFacts
from covey.plan.layout import THIS_MACHINE, Layout
from covey.types import BlindReward, Problem, RewardFault


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known; None means that it is not known, and a check that needs it is silent. Lengths are
    tokens.

    num_processes          training processes over all machines
    num_processes_here     those of this machine; None where they are all of them
    is_rank                whether this is one of several processes that a launcher has started
    objects                names of the live objects that the program has given
    num_rows               rows of the data files
    num_prompts            rows that are used: those with a prompt that is not too long
    num_prompts_too_long   rows left out because their prompt is too long
    longest_prompt         longest prompt among the rows that are used
    longest_prompt_in_data the same over all rows, before any is left out
    columns                names of the data set's columns
    made_columns           those of them that reading the rows made, such as a gold out of a conversation
    missing_columns        columns that the prompt or a reward needs and that are not there
    dataset_missing        paths that do not exist
    dataset_unreadable     files that exist and cannot be read
    model_problem          why the model cannot be read; None where it can be, or where nobody looked
    model_fault            what kind of fault that is, and `model_details` what is known beyond it
    template_problem       why its chat template cannot be used, beside what is wrong with the model, and
                           `template_details` what is known beyond that
    stored_quantization    the options that its weights stand for, where bitsandbytes has quantized them
    unused_tensors         tensors of its files that the model has no use for
    tokens_beyond          (token, id) of the tokenizer's tokens that the embedding has no row for
    embedding_rows         rows of the embedding, by config.json
    model_dir              the directory that its files lie in
    model_type             its family, as config.json names it
    num_parameters         weights of the model
    num_trained            weights that are trained: all of them, or those of the adapters
    model_sizes            widths and counts that its memory follows from
    stop_tokens            the end tokens and where each comes from, in words
    banned_tokens          the tokens that its generation_config.json bans, in words; else ""
    unstoppable_turn       what the template ends an assistant's turn with, if that is no token; else ""
    hidden_stop_words      (word, special token) of stop words that no text contains
    unused_sampling        settings of the model's generation_config.json that sampling does not follow
    first_prompt           the first rendered prompt
    has_chat_template      whether the model, or the command, brings a chat template
    prompt_problem         what the chat template does to a prompt that it does to no conversation
    answer_opening         what it puts in front of an answer there, and not behind a prompt; else ""
    unwritten_prefix       what the tokenizer puts before a plain text, and a typed template does not; else ""
    prompts_are_text       whether prompts are strings that no template has been put around
    mentions_format        whether a prompt speaks of the tags that the reward format pays for
    media_columns          columns with images, audio or video
    unread_columns         columns with bytes, which rewards are not given
    unused_columns         columns that a `prompt` string has no place for, such as a system message
    preference_pairs       whether the rows are pairs of answers without what GRPO needs
    task_column_guess      a column that names a task in every row, where the typed one names none
    left_out               rows without a usable prompt
    tasks                  rows that are used of each task
    eval_tasks             tasks of the sets to evaluate on
    taskless               rows that name no task, as reason the set to evaluate on or ""
    pass_rates             what is known of measured pass rates
    data_notes             what was read in another way than asked, in words
    data_problem           why the rows do not make a data set: mixing, columns, splitting
    hub_problem            why a hub does not give a data set
    golds                  what the gold answers are, where a reward needs them
    sandbox                how programs of completions are shut off, where a reward runs them
    code_tests             what their tests are: as golds, with the reasons that one cannot be run
    reward_models          the models among the rewards
    judge                  what the reward judge is told, where a run asks for it
    faulty_rewards         rewards that cannot be loaded, called, or that failed their trial
    blind_rewards          rewards that read a gold column and do not tell its answers from others
    process_rewards        those that gave one number per step in their trial
    reads_steps            whether a reward does, or names the steps; None: not known without a trial
    reward_names           the names of the rewards in metrics, in order
    reward_notes           what is to be said of the rewards
    reward_texts           (entry, digest) of what is written of each reward that is a function
    unmatched_targets      adapter targets that match no module
    adapter                the adapter that the run starts from, where it starts from one
    untrainable_targets    (name, reason) of adapter targets that an adapter would not reach
    eval_sets              the sets of prompts to evaluate on
    missing_packages       (option, what has to be installed) for libraries that are not there
    has_bfloat16           whether the training device computes in bfloat16
    npu                    environment variable that picks Ascend NPUs
    model_context          positions of the model
    rewards_available      every name that `reward_funcs` may hold
    reward_options         options that only a built-in reward reads, by its name
    checkpoint_bytes       size of one checkpoint with everything a resume needs
    model_bytes            size of one that is reduced to the model
    free_disk_bytes        free space where output_dir lies
    output_dir_fault       why output_dir cannot be written, or ""
    owner                  the process that writes to output_dir now, where there is one
    records_problem        why the records in output_dir cannot be gone on with, as (path, words)
    in_the_way             (path, words) of what stands in output_dir under a name that the run will need
    free_memory_bytes      memory that is free: of the smallest GPU, else of the machine for all processes
    cuda                   whether training uses CUDA
    nproc_available        GPUs with CUDA, else cores of this machine
    layout                 the devices, and how model and engine lie on them; `layout_problems` say what of
                           it could not be read
    versions               (package, version) of the libraries that the run rests on
    ray                    the Ray that the ranks are started in; None where it is not looked for
    servers                what each rollout server says; None: not asked
    token_problem          why the file of their token cannot be used
    """

    num_processes: int = 1
    num_processes_here: int | None = None
    is_rank: bool = False
    objects: tuple[str, ...] = ()
    num_rows: int | None = None
    num_prompts: int | None = None
    num_prompts_too_long: int | None = None
    longest_prompt: int | None = None
    longest_prompt_in_data: int | None = None
    columns: tuple[str, ...] | None = None
    made_columns: tuple[str, ...] = ()
    missing_columns: tuple[MissingColumn, ...] | None = None
    dataset_missing: tuple[str, ...] | None = None
    dataset_unreadable: tuple[UnreadableFile, ...] | None = None
    model_problem: str | None = None
    model_fault: ModelFault | None = None
    model_details: FaultDetails = NO_DETAILS
    template_problem: str | None = None
    template_details: FaultDetails = NO_DETAILS
    stored_quantization: Mapping[str, Any] | None = None
    unused_tensors: tuple[str, ...] = ()
    tokens_beyond: tuple[tuple[str, int], ...] = ()
    embedding_rows: int | None = None
    model_dir: str | None = None
    model_type: str | None = None
    model_context: int | None = None
    num_parameters: int | None = None
    num_trained: int | None = None
    model_sizes: ModelSizes | None = None
    stop_tokens: str | None = None
    banned_tokens: str = ""
    unstoppable_turn: str = ""
    hidden_stop_words: tuple[tuple[str, str], ...] = ()
    unused_sampling: tuple[tuple[str, float], ...] = ()
    first_prompt: str | None = None
    has_chat_template: bool | None = None
    prompt_problem: str | None = None
    answer_opening: str = ""
    unwritten_prefix: str = ""
    prompts_are_text: bool | None = None
    mentions_format: bool | None = None
    media_columns: tuple[str, ...] = ()
    unread_columns: tuple[str, ...] = ()
    unused_columns: tuple[str, ...] = ()
    preference_pairs: bool = False
    task_column_guess: str | None = None
    left_out: tuple[LeftOut, ...] = ()
    tasks: Mapping[str, int] = field(default_factory=dict)
    eval_tasks: tuple[str, ...] = ()
    taskless: tuple[LeftOut, ...] = ()
    pass_rates: PassRateFacts | None = None
    data_notes: tuple[str, ...] = ()
    data_problem: DataProblem | None = None
    hub_problem: HubProblem | None = None
    golds: GoldFacts | None = None
    sandbox: SandboxFacts | None = None
    code_tests: GoldFacts | None = None
    reward_models: tuple[RewardModelFacts, ...] = ()
    judge: JudgeFacts | None = None
    faulty_rewards: tuple[RewardFault, ...] = ()
    blind_rewards: tuple[BlindReward, ...] = ()
    process_rewards: tuple[str, ...] = ()
    reads_steps: bool | None = None
    reward_names: tuple[str, ...] = ()
    reward_notes: tuple[str, ...] = ()
    reward_texts: tuple[tuple[str, str], ...] = ()
    adapter: AdapterFacts | None = None
    unmatched_targets: tuple[TargetFacts, ...] = ()
    untrainable_targets: tuple[tuple[str, str], ...] = ()
    eval_sets: tuple[EvalSet, ...] = ()
    missing_packages: tuple[tuple[str, str], ...] = ()
    has_bfloat16: bool | None = None
    output_dir_state: OutputDirState | None = None
    output_dir_fault: str = ""
    owner: RunOwner | None = None
    records_problem: tuple[str, str] | None = None
    in_the_way: tuple[tuple[str, str], ...] = ()
    resume: ResumeFacts | None = None
    replay_problem: str | None = None
    rewards_available: tuple[str, ...] | None = None
    reward_options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    checkpoint_bytes: int | None = None
    model_bytes: int | None = None
    free_disk_bytes: int | None = None
    free_memory_bytes: int | None = None
    cuda: bool | None = None
    npu: str = ""
    nproc_available: int | None = None
    layout: Layout = THIS_MACHINE
    layout_problems: tuple[Problem, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    ray: RayFacts | None = None
    servers: tuple[ServerFacts, ...] | None = None
    token_problem: str | None = None
