"""Finds faults in the adapter or the checkpoint that a run starts from."""

from __future__ import annotations

from collections.abc import Collection

from covey.checks.check import Check
from covey.codes import Code
from covey.config.quantization import quantization_of
from covey.config.start import BASE, START
from covey.options.schema import Config
from covey.plan.facts import AdapterFacts, LoraFacts, OutputFacts, ResumeFacts
from covey.plan.memory_training import has_kl
from covey.plan.problem import problem, warning
from covey.texts import tr
from covey.types import Fix, Problem


def start_problems(
    config: Config, lora: LoraFacts, output: OutputFacts, typed: Collection[str]
) -> list[Problem]:
    """Return what stands against starting from this adapter, with this reference."""
    return [*_fit(config, lora), *_reference(config, lora, typed), *_resumed(config, lora, output)]


def is_settled(said: Problem, lora: LoraFacts) -> bool:
    """Return whether the model shows that what was said of the options alone is no fault: the adapter lies on
    every linear layer, which `all-linear` means."""
    is_on_all = lora.start is not None and lora.start.is_on_all_linear
    return said.code == "E382" and said.option == "target_modules" and is_on_all


def foreign_resume(resume: ResumeFacts) -> Problem:
    """Return the problem of a resume from a checkpoint of another trainer."""
    option = "adapters" if resume.foreign == "adapter" else "model"
    what = "adapter" if resume.foreign == "adapter" else "weights"
    return problem(
        "E418",
        "resume_from_checkpoint",
        tr("{path} {problem}", path=resume.path, problem=resume.problem),
        "",
        Fix(
            text=tr(
                "a new run from its {what}, in another directory and without "
                "--resume_from_checkpoint: --{option} {path}",
                what=what,
                option=option,
                path=resume.path,
            )
        ),
    )


def _fit(config: Config, lora: LoraFacts) -> list[Problem]:
    if lora.start is None:
        return []
    if lora.start.problem is None:
        return _other_base(config, lora.start)
    return [
        problem(
            "E383",
            "adapters",
            tr(
                "The adapter {adapters} does not fit {model}: {problem}.",
                adapters=config.adapters,
                model=config.model,
                problem=lora.start.problem,
            ),
            "",
            Fix(text=tr("use the model that the adapter was trained on: --model BASE")),
        )
    ]


def _other_base(config: Config, adapter: AdapterFacts) -> list[Problem]:
    if adapter.other_base:
        seen = tr(
            "The adapter {adapters} was trained on {other_base}, but model is {model}.",
            adapters=config.adapters,
            other_base=adapter.other_base,
            model=config.model,
        )
        same = [Fix(text=tr("use the base model of the adapter"), edits={"model": adapter.other_base})]
        other = Fix(text=tr("no action is needed if both names mean the same model"))
    elif adapter.quantized:
        own = quantization_of(config)
        now = tr("not quantized") if own is None else tr("quantized to {in_words}", in_words=own.in_words)
        seen = tr(
            "The adapter {adapters} was trained on a quantized base ({quantized}), but {model} is {now}.",
            adapters=config.adapters,
            quantized=adapter.quantized,
            model=config.model,
            now=now,
        )
        same = (
            [Fix(text=tr("quantize the base in the same way"), edits=adapter.quantization)]
            if adapter.quantization
            else []
        )
        other = Fix(text=tr("no action is needed if small differences in the base weights are acceptable"))
    else:
        return []
    return [warning("W152", "adapters", seen, "", *same, other)]


def _reference(config: Config, lora: LoraFacts, typed: Collection[str]) -> list[Problem]:
    where = config.ref_adapters
    is_word = where in (START, BASE)
    start = Fix(text=tr("use the adapter as it is at the start"), edits={"ref_adapters": START})
    base = Fix(text=tr("use the model without the adapter"), edits={"ref_adapters": BASE})
    if config.adapters is None:
        if is_word:
            return []
        return [
            problem(
                "E384",
                "ref_adapters",
                tr(
                    "ref_adapters is {where}, but adapters is not set: the policy would start from "
                    "the base model, not from its reference.",
                    where=where,
                ),
                tr("In ms-swift both options name the adapter of the first training."),
                Fix(text=tr("start the policy from that adapter too"), edits={"adapters": where}),
                Fix(text=tr("leave out --ref_adapters")),
            )
        ]
    if not has_kl(config):
        if is_word or "ref_adapters" not in typed:
            return []
        seen = tr(
            "ref_adapters is {where}, but beta is 0, so there is no KL term and no reference model.",
            where=where,
        )
        return [warning("W108", "ref_adapters", seen, "", Fix(text=tr("leave out --ref_adapters")))]
    if lora.start is not None and lora.start.reference_problem is not None:
        code, words = lora.start.reference_problem
        return [problem(code, "ref_adapters", tr("ref_adapters: {words}.", words=words), "", start, base)]
    if config.sync_ref_model and where == BASE:
        return [
            problem(
                "E384",
                "ref_adapters",
                tr(
                    "ref_adapters is base and sync_ref_model is on, but only an adapter can follow "
                    "the policy."
                ),
                "",
                start,
                Fix(text=tr("keep the reference model fixed"), edits={"sync_ref_model": False}),
            )
        ]
    return []


def _resumed(config: Config, lora: LoraFacts, output: OutputFacts) -> list[Problem]:
    """Where a run would go on with the weights of another reference than those that it began with."""
    resume = output.resume
    if resume is None or resume.problem is not None or resume.reference is None or not has_kl(config):
        return []
    is_unread = config.adapters is not None and lora.start is None
    now = None if lora.start is None else lora.start.digest
    is_asked = config.allow_changes or any(name == "ref_adapters" for name, _, _ in resume.config_changes)
    if is_unread or is_asked or now == resume.reference:
        return []
    held = (
        tr("no adapter is named now")
        if now is None
        else tr("the SHA-256 of the adapter named now begins with {now}", now=now[:12])
    )
    return [
        problem(
            "E419",
            "adapters",
            tr(
                "{path} was made with a reference adapter whose SHA-256 begins with {reference}; {held}.",
                path=resume.path,
                reference=resume.reference[:12],
                held=held,
            ),
            "" if now is None else tr("The adapter's directory was overwritten, or another one is named."),
            Fix(text=tr("use the adapter that the run started with: --adapters DIR")),
        )
    ]


_CODES = (
    Code(
        code="E383",
        title="Adapter that does not match the model",
        why="The model lacks some of the layers that the adapter changes, so the run would not start "
        "from the model that was trained.",
    ),
    Code(
        code="E418",
        title="Checkpoint of another trainer",
        why="The state of its optimizer is a pickled file, which can execute code when it is loaded, "
        "so covey cannot use it. A new run can start from its weights.",
    ),
    Code(
        code="E419",
        title="Reference model differs from that of the stopped run",
        why="The KL term would compare with another model than before the stop, so the steps after it "
        "would differ from those of the stopped run.",
    ),
    Code(
        code="W152",
        title="Adapter of another base model",
        why="An adapter is trained on one base model. On another base model it gives a model that "
        "nobody trained, even if every tensor has the right shape.",
    ),
)

CHECK = Check(
    place=30,
    judge=lambda config, facts, typed: start_problems(config, facts.lora, facts.output, typed or ()),
    codes=_CODES,
)
