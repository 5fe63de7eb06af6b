"""`--help` of each verb: every option with its default and its other names, from what is
declared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covey.config.dialect import ms_swift_typed
from covey.config.quickstart import QUICKSTART
from covey.config.values import default_in, kind_of
from covey.options.declare import Options, facts_of, fields_of
from covey.options.schema import GROUPS, OPTIONS, REQUIRED, Config, group_of
from covey.options.verbs import (
    DoctorOptions,
    ExportOptions,
    MismatchOptions,
    PlanOptions,
    QuickstartOptions,
    ReplayOptions,
    RolloutOptions,
    SelftestOptions,
    VerifyOptions,
)
from covey.plan.words import flags, wrapped
from covey.texts import Whole, tr
from covey.texts.language import spoken

_USAGE: Mapping[str, str] = {
    "train": tr(
        """\
usage: covey train [CONFIG.yaml] --option value ...

  covey train --model DIR --dataset train.jsonl --reward_funcs accuracy format
  covey train runs/my-run/config.yaml --learning_rate 5e-6 --output_dir runs/my-run-2

CONFIG.yaml holds the same option names, at the top level or under the headings below; values on the command
line override it. A list takes several values. If an option is repeated, the last one counts. A switch is
--x, --x true, --x false or --no_x.
"""
    ),
    "rlhf": tr(
        """\
usage: covey rlhf --rlhf_type grpo --option value ...

The options of `covey train`, with those defaults of ms-swift that affect the result:
"""
    ),
    "plan": tr(
        """\
usage: covey plan [CONFIG.yaml] --option value ... [--json]

The options of `covey train`, or with --rlhf_type grpo those of `covey rlhf`. Nothing is written, no weights
are read, and no hub is contacted: model and data must be on this machine.

With --plan_gpus it plans for another machine; the model's config.json and tokenizer are enough for that.
The result is only a forecast: `covey train` runs on the machine on which it is started.

"""
    ),
    "rehearse": tr(
        """\
usage: covey rehearse [CONFIG.yaml] --option value ...

The options of `covey train`. In place of the model, scripts play one prompt: the right answer, random words,
silence, a broken call, a call with wrong arguments, a call whose tool raises, calls without end. It prints
the reward of each, and one episode with its trained turns marked. No weights are read and nothing is written.

"""
    ),
    "eval": tr(
        """\
usage: covey eval MODEL_OR_CHECKPOINT --dataset FILE ... [--option value ...]

Samples and scores the prompts as an evaluation during training does, prints the metrics, and writes eval.json
with every completion. --dataset names what to evaluate on, and so does --val_dataset. For a checkpoint of a
run, the options of that run are used; options on the command line override them. The relevant options are in
the groups Data, Rewards, Sampling and Evaluation.
"""
    ),
    "quickstart": tr(
        """\
usage: covey quickstart [--task sums|tools|shapes] [--option value ...]

The options of `covey train`, with these values as defaults (of the task sums):
"""
    ),
    "doctor": tr(
        """\
Reads the directory of a run and says whether it learns, what is wrong, why, and what to type. RUN may also be
an output directory of TRL (trainer_state.json) or of ms-swift (logging.jsonl), or one of these files. Nothing
is written, no weights are read, and the network is not used. `covey doctor --live PID` looks at a run that
is still running.

The exit code is 0 if the run is healthy, 3 if something is wrong with it, and 2 if RUN is not a run.
"""
    ),
    "export": tr(
        """\
Writes the model of a checkpoint, without the files that only a resumed run needs. With --merge the adapter
is merged into its base model, and the result is loaded again and compared: it is written only if the logits
agree.
"""
    ),
    "verify": tr(
        """\
Says what is wrong with a checkpoint of a run: files that are missing, unexpected, too short or changed, rows
that no rank has saved, and a model that does not match its config.json. The directory of a model has no
manifest and is checked against its index and the headers of its files. Nothing is written, and no weights
are loaded.

The exit code is 0 if all are intact, 1 if one is damaged, and 2 if one is not a checkpoint.
"""
    ),
    "mismatch": tr(
        """\
Scores the recorded tokens of a rollout again by the weights that sampled them, where a checkpoint of their
step is there, and then with one thing changed at a time: dtype, kernels, layout, filters, temperature, banned
tokens, tokenizer, images, weights of other steps, adapter. It prints how far the log-probabilities of the
sampler are from each, and which change explains the gap. Nothing is written.
"""
    ),
    "replay": tr(
        """\
Shows the episodes of a recorded group as conversations. It renders each again, gives tools and environment
the recorded turns again, scores the recorded tokens by a checkpoint, and says where anything differs from
the record. --sample also draws the episodes again, by the weights that sampled them. Nothing is written.
"""
    ),
    "rollout": tr(
        """\
Serves the built-in engine over HTTP to runs on other devices. A run needs its address and its token file:

  covey rollout --model DIR --port 8000
  covey train ... --rollout_servers http://127.0.0.1:8000 --rollout_token_file rollout-8000.token

It accepts connections from this machine only, unless --host is set. It serves one run at a time, and samples
nothing until that run has published its weights.
"""
    ),
    "selftest": tr(
        """\
Computes the same results in two ways on this machine and prints how much they differ, as a table that can be
pasted into an issue. Exits with 3 if a difference is above its bound. Writes only temporary files and does
not use the network.
"""
    ),
}
"""What is said of a verb above its options."""


_WORDS: Mapping[str, tuple[str, type[Options]]] = {
    "doctor": ("RUN", DoctorOptions),
    "export": ("CHECKPOINT", ExportOptions),
    "mismatch": ("RUN", MismatchOptions),
    "replay": ("RUN", ReplayOptions),
    "rollout": ("", RolloutOptions),
    "selftest": ("", SelftestOptions),
    "verify": ("CHECKPOINT ...", VerifyOptions),
}
"""The words of the verbs that take no option of a run, and what declares their own."""


def verb_help(verb: str) -> str:
    """Return the help of a verb with the values that it puts in the place of defaults."""
    if verb in _WORDS:
        return _own_help(verb, *_WORDS[verb])
    values = {"rlhf": {n: t.value for n, t in ms_swift_typed({}).items()}, "quickstart": QUICKSTART}
    return help_text(verb, values.get(verb))


def _own_help(verb: str, words: str, declares: type[Options]) -> str:
    kinds = {name: kind_of(name, declares) for name in fields_of(declares)}
    typed = [
        f"[--{name}]" if kind.base == "bool" else f"[--{name} {kind.placeholder}]"
        for name, kind in kinds.items()
    ]
    line = Whole(" ".join(part for part in ("covey", verb, words, *typed) if part))
    return "\n".join(
        [
            spoken(tr("usage: {line}", line=line)),
            "",
            spoken(_USAGE[verb]),
            *(_option(name, declares) for name in kinds),
            "",
        ]
    )


def help_text(verb: str, values: Mapping[str, Any] | None = None) -> str:
    """Return the help of a verb that takes the options of a run; `values` are those in place of defaults."""
    lines = [spoken(_USAGE[verb])]
    if verb == "plan":
        lines += [*(_option(name, PlanOptions) for name in fields_of(PlanOptions)), ""]
    if verb == "quickstart":
        lines += [*(_option(name, QuickstartOptions) for name in fields_of(QuickstartOptions)), ""]
    if values:
        lines += [f"  {flags({name: value})}" for name, value in values.items()] + [""]
    for group, heading in GROUPS.items():
        names = [name for name in OPTIONS if group_of(name) == group]
        if names:
            lines += [_said(heading), "", *(_option(n, Config, (values or {}).get(n)) for n in names), ""]
    return "\n".join(lines)


def _option(name: str, declares: type[Options], value: Any = None) -> str:
    parts = [_said(fields_of(declares)[name].description or ""), spoken(_default(name, declares, value))]
    if others := facts_of(declares)[name].names:
        parts.append(spoken(tr("also: {flags}", flags=_flags(*others))))
    kind = kind_of(name, declares)
    return "\n".join([f"  --{name} {kind.placeholder}", *(wrapped(part, "      ") for part in parts)])


def _said(text: str) -> str:
    """A text of a declaration in the language of this process."""
    return spoken(tr(text)) if text else ""


def _flags(*names: str) -> str:
    return ", ".join(f"--{name}" if len(name) > 1 else f"-{name}" for name in names)


def _default(name: str, declares: type[Options], value: Any) -> str:
    if value is not None:
        return tr("default here: {words}", words=_words(name, value))
    if declares is Config and name in REQUIRED:
        return tr("required")
    if rule := facts_of(declares)[name].rule:
        return tr("default: {rule}", rule=tr(rule))
    default = default_in(declares, name)
    return tr("default: not set") if default is None else tr("default: {words}", words=_words(name, default))


def _words(name: str, value: Any) -> str:
    return flags({name: value}).partition(" ")[2]
