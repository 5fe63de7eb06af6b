"""What the checks need to know of the machine, the model and the data; gathered elsewhere, so that checks
stay pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from covey.plan.layout import Layout

# "ended" is a run that left no checkpoint to go on from.
OutputDirState = Literal["free", "run", "ended", "not_empty", "not_writable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingColumn:
    """A column the data set lacks: `MissingColumn(column="solution", needed_by="the reward accuracy")`.

    `rename` is (old name, new name) of a column with which the data was tried and works, or None. `where` is
    the set to evaluate on, "" for the data to train on.
    """

    column: str
    needed_by: str
    rename: tuple[str, str] | None = None
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableFile:
    """A data file that is there and cannot be read: `UnreadableFile(path="a.jsonl", words="line 3: no
    JSON")`."""

    path: str
    words: str


ModelFault = Literal["missing", "kind", "media", "code", "format", "hub", "template", "weights", "quantized"]
"""What is wrong with a model: its files, what it is, that it sees or hears, that it brings code, that its
weights are not safetensors, that a hub does not give it, its chat template, that its weights are not those of
its config.json, or that they are quantized."""

RewardFault = Literal["unknown", "load", "signature", "trial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyReward:
    """A reward that cannot be used: `FaultyReward(name="mine.py:f", kind="load", words="...")`."""

    name: str
    kind: RewardFault
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlindReward:
    """A reward ("": the weighted total) that, on all but `num_told` of `num_rows` rows, gives the gold of
    `column` no more than what it is compared with; `constant` is the one value that it gives, or None, and
    `form` the form of the gold of which that holds, "" for all."""

    name: str
    column: str
    compared: Literal["empty", "others"]
    num_rows: int
    num_told: int
    constant: float | None = None
    form: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldFacts:
    """What the gold answers are: how many were read, how many were not, and the first of those as (row
    number from 1, text, reason)."""

    num_checked: int
    num_bad: int
    examples: tuple[tuple[int, str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxFacts:
    """How programs of completions are shut off here: the layers that lack, none where they may run, and why
    each way that was tried is not open."""

    lacks: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelFacts:
    """A reward model as it was typed, and what its files say of it.

    name          the name of its metric
    directory     where its files lie, "" where they cannot be had
    problem       why its logit is no reward, and `fault` what kind of thing it is instead; or None
    parameters    weights
    file_bytes    bytes of the files that hold them
    hidden        width of a layer's output, and `intermediate` that of its MLP
    context       positions, None where nobody says
    has_template  whether it brings a chat template
    is_here       whether its weights are on this machine
    """

    entry: str
    name: str
    directory: str = ""
    problem: str | None = None
    fault: str = ""
    parameters: int = 0
    file_bytes: int = 0
    hidden: int = 0
    intermediate: int = 0
    context: int | None = None
    has_template: bool = False
    is_here: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeFacts:
    """What is wrong with what the reward judge is told, in words: its prompt and its pattern; and the names
    in the prompt that nothing has a value for."""

    prompt_problem: str | None = None
    regex_problem: str | None = None
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Rows without a usable prompt, by reason: `LeftOut(reason="no_prompt", count=3, rows=(4, 9, 11))`, row
    numbers from 1. `detail` is what stands in the first of them, and `where` the set to evaluate on, "" for
    the data to train on."""

    reason: str
    count: int
    rows: tuple[int, ...] = ()
    detail: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRateFacts:
    """What is known of measured pass rates.

    where         the file, run or column that they are of
    digest        a checksum of what was measured; "" for a column, which changes with its data
    num_rows      usable rows
    num_measured  those of them that have a pass rate
    num_kept      those that are used
    histogram     measured rows by tenths of the pass rate
    problem       why there are none, in words
    """

    where: str
    digest: str = ""
    num_rows: int = 0
    num_measured: int = 0
    num_kept: int = 0
    histogram: tuple[int, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """Adapter targets of the command that match no module, each with the nearest names there are."""

    target: str
    nearest: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a model by its config.json and the headers of its weight files, for the memory forecast.

    family        model_type
    layers        decoder layers
    hidden        width of the residual stream
    heads         query heads of a layer
    kv_heads      key heads of a layer
    head_width    width of a head
    intermediate  width of the MLP; of a mixture of experts that of all experts of a token together
    vocabulary    rows of the head
    tied          whether head and embedding are one tensor
    parameters    weights
    adapted       last words of the names of the layers that the adapters of the configuration lie on, whether
                  or not it trains adapters
    adapted_parameters  weights of those layers
    adapter_parameters  weights of the adapters
    saved_parameters    weights that are trained whole beside the adapters
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    intermediate: int
    vocabulary: int
    tied: bool
    parameters: int
    adapted: tuple[str, ...] = ()
    adapted_parameters: int = 0
    adapter_parameters: int = 0
    saved_parameters: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """A set of prompts to evaluate on."""

    name: str
    num_prompts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeFacts:
    """What was found where a resume was asked for.

    `problem` says why it is no checkpoint to go on from, or is None; `step` is the checkpoint's; `skipped`
    says of each newer one why it is passed over. `is_elsewhere` is where it does not lie in output_dir.
    `config_changes` are the options that differ from those of the stopped run as (name, old value, new
    value), where its config.yaml can be read (`is_compared`); `pass_rates` is the digest of what was measured
    then.
    """

    path: str
    problem: str | None = None
    step: int | None = None
    skipped: tuple[str, ...] = ()
    is_elsewhere: bool = False
    is_compared: bool = True
    config_changes: tuple[tuple[str, Any, Any], ...] = ()
    pass_rates: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOwner:
    """The process that writes to a run directory now; a number or a word that nobody knows is 0 or "".

    pid      its number
    host     the name of its machine
    since    when it took the directory
    sign_s   seconds since its last sign
    path     the file that says so
    is_here  whether it is certain to run on this machine
    """

    pid: int = 0
    host: str = ""
    since: str = ""
    sign_s: float = 0.0
    path: str = ""
    is_here: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What an earlier run of the same work took, in seconds, over its steps from `first_step` to `last_step`.

    path         its directory
    step_s       an optimizer step, the median
    rollout_s    a rollout with all of its optimizer steps, the median
    mean_length  tokens of a completion
    """

    path: str
    first_step: int
    last_step: int
    step_s: float
    rollout_s: float
    mean_length: float
    completions_per_step: int
    completions_per_rollout: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known; None means that it is not known, and a check that needs it is silent. Lengths are
    tokens.

    num_processes          training processes over all machines
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
    model_fault            what kind of fault that is
    template_problem       why its chat template cannot be used, beside what is wrong with the model
    unused_tensors         tensors of its files that the model has no use for
    tokens_beyond          (token, id) of the tokenizer's tokens that the embedding has no row for
    embedding_rows         rows of the embedding, by config.json
    model_dir              the directory that its files lie in
    model_type             its family, as config.json names it
    num_parameters         weights of the model
    num_trained            weights that are trained: all of them, or those of the adapters
    model_sizes            widths and counts that its memory follows from
    stop_tokens            the end tokens and where each comes from, in words
    unstoppable_turn       what the template ends an assistant's turn with, if that is no token; else ""
    unused_sampling        settings of the model's generation_config.json that sampling does not follow
    first_prompt           the first rendered prompt
    has_chat_template      whether the model, or the command, brings a chat template
    prompt_problem         what the chat template does to a prompt that it does to no conversation
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
    data_problem           why the rows do not make a data set, in words: mixing, columns, splitting
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
    unmatched_targets      adapter targets that match no module
    untrainable_targets    (name, reason) of adapter targets that an adapter would not reach
    eval_sets              the sets of prompts to evaluate on
    missing_packages       (option, what has to be installed) for libraries that are not there
    has_bfloat16           whether the training device computes in bfloat16
    model_context          positions of the model
    rewards_available      every name that `reward_funcs` may hold
    reward_options         options that only a built-in reward reads, by its name
    checkpoint_bytes       size of one checkpoint with everything a resume needs
    model_bytes            size of one that is reduced to the model
    free_disk_bytes        free space where output_dir lies
    owner                  the process that writes to output_dir now, where there is one
    records_problem        why the records in output_dir cannot be gone on with, as (path, words)
    in_the_way             (path, words) of what stands in output_dir under a name that the run will need
    free_memory_bytes      memory that is free: of the smallest GPU, else of the machine for all processes
    cuda                   whether training uses CUDA
    nproc_available        GPUs with CUDA, else cores of this machine
    layout                 the machine that the plan is for, where that is not this one
    versions               (package, version) of the libraries that the run rests on
    measured               what an earlier run of the same work took on this machine
    """

    num_processes: int = 1
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
    template_problem: str | None = None
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
    unstoppable_turn: str = ""
    unused_sampling: tuple[tuple[str, float], ...] = ()
    first_prompt: str | None = None
    has_chat_template: bool | None = None
    prompt_problem: str | None = None
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
    data_problem: str | None = None
    hub_problem: str | None = None
    golds: GoldFacts | None = None
    sandbox: SandboxFacts | None = None
    code_tests: GoldFacts | None = None
    reward_models: tuple[RewardModelFacts, ...] = ()
    judge: JudgeFacts | None = None
    faulty_rewards: tuple[FaultyReward, ...] = ()
    blind_rewards: tuple[BlindReward, ...] = ()
    process_rewards: tuple[str, ...] = ()
    reads_steps: bool | None = None
    reward_names: tuple[str, ...] = ()
    reward_notes: tuple[str, ...] = ()
    unmatched_targets: tuple[TargetFacts, ...] = ()
    untrainable_targets: tuple[tuple[str, str], ...] = ()
    eval_sets: tuple[EvalSet, ...] = ()
    missing_packages: tuple[tuple[str, str], ...] = ()
    has_bfloat16: bool | None = None
    output_dir_state: OutputDirState | None = None
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
    nproc_available: int | None = None
    layout: Layout | None = None
    versions: tuple[tuple[str, str], ...] = ()
    measured: Measured | None = None
