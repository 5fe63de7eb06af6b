"""Facts about the model: where it lies, what it is, its tokens, its size, and what an adapter comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.checks.judge import checks
from covey.checks.lora.look import with_adapter
from covey.checks.model.checkpoint_sizes import checkpoint_sizes
from covey.checks.model.memory import model_sizes
from covey.checks.model.parts import part_facts
from covey.checks.rewards.models import fetch_reward_models
from covey.config.filters import FILTERS
from covey.config.objects import is_live
from covey.config.quantization import quantization_of, stored_options
from covey.config.start import adapter_directory
from covey.data.errors import ModelError, TemplateError
from covey.data.hub import fetch_weights, locate_model
from covey.data.model_files import ModelProblem, model_context, model_problem, read_json, vocabulary_of
from covey.data.prompt_checks import prompt_problem, unwritten_prefix
from covey.data.stop_words import stop_words
from covey.data.text import TextCodec, load_codec
from covey.data.token_words import banned_tokens_in_words, stop_tokens_in_words
from covey.data.vision import ImageOptions
from covey.errors import ConfigError
from covey.media.families import FAMILIES as SEEING
from covey.media.sizes import preparation_of
from covey.models.adapter_shapes import LoraSettings, ModelShapes, facts_of, read_shapes, settings_of
from covey.models.config_shapes import FAMILIES, shapes_of_config
from covey.models.fit import fit_of
from covey.options.schema import Config
from covey.plan.facts import DataProblem, Facts, FaultDetails, ModelFacts, ModelFault, TargetFacts
from covey.quickstart.built_in import BUILT_IN
from covey.texts import joined, replaced, tr
from covey.weight_files import stored_tensors

if TYPE_CHECKING:
    from covey.models.live import LiveModel

_OFF = {"repetition_penalty": 1.0}

_FAULTS: Mapping[str, ModelFault] = {
    "remote_code": "code",
    "vision": "media",
    "encoder_decoder": "kind",
    "not_causal": "kind",
    "no_model_type": "kind",
    "unknown_model_type": "kind",
    "adapter": "kind",
    "pickled_weights": "format",
    "shards": "shards",
    "weights": "weights",
    "quantized": "quantized",
}


def model_dir(config: Config) -> Path:
    """Where the model's files lie on this machine once they are there; nothing is asked of a hub."""
    if config.model in BUILT_IN:
        return BUILT_IN[config.model].model_dir
    return locate_model(
        config.model, revision=config.model_revision, use_hf=config.use_hf, offline=True
    ).directory


def fetch_model(config: Config) -> None:
    """Bring the weights of a hub's models to this machine; ConfigError says why they cannot be had."""
    fetch_reward_models(config)
    if config.model in BUILT_IN or is_live(config.model):
        return
    try:
        fetch_weights(config.model, revision=config.model_revision, use_hf=config.use_hf)
    except ModelError as error:
        facts = Facts(model=ModelFacts(problem=str(error), fault="hub", details=details_of(error)))
        raise ConfigError([p for p in checks(config, facts) if p.code == "E321"]) from error


def lora_settings(config: Config) -> LoraSettings | None:
    """The adapter that a configuration asks for, or None."""
    return _adapter_settings(config) if config.tuner_type == "lora" else None


def _adapter_settings(config: Config) -> LoraSettings:
    """The adapter that a configuration describes, whether or not it trains one."""
    options = config.model_dump()
    if config.tuner_type == "full":
        options |= {"freeze_vit": True, "freeze_aligner": True}
    return settings_of(options)


def with_model(
    facts: Facts,
    config: Config,
    *,
    offline: bool,
    live: LiveModel | None = None,
    adapter: Path | None = None,
) -> tuple[Facts, TextCodec | None]:
    """The facts with those of the model, and its tokenizer where it could be read; an `adapter` on the model
    may bring a chat template of its own.

    Where the layout of another machine is planned, config.json stands for weights that are not here. A `live`
    model is what the configuration names; its weights are in memory that is not free any more.
    """
    if not config.model or (live is None and is_live(config.model)):
        return facts, None
    if live is not None:
        facts = _with_live(facts, config, live)
        return _with_codec(facts, config, live.directory, adapter)
    try:
        directory, is_whole = _located(config, offline=offline)
    except ModelError as error:
        facts = replace(
            facts, model=replace(facts.model, problem=str(error), fault="hub", details=details_of(error))
        )
        return facts, None
    packs = quantization_of(config) is not None
    problem = model_problem(directory, with_weights=is_whole and facts.layout.is_here, takes_packed=packs)
    facts = replace(facts, model=replace(facts.model, stored_quantization=_stored_quantization(directory)))
    if problem is not None and not (problem.kind == "remote_code" and config.trust_remote_code):
        facts = _with_problem(facts, problem, directory)
        return (facts, None) if problem.kind == "closed" else _with_codec(facts, config, directory, adapter)
    facts = _with_config(replace(facts, model=replace(facts.model, directory=str(directory))), directory)
    try:
        facts = _with_sizes(facts, config, directory, _shapes(directory))
        # Of tensors that are packed the load says whether they are the model's.
        if is_whole and problem is None and facts.layout.is_here and facts.model.stored_quantization is None:
            facts = _with_fit(facts, directory)
        if not facts.layout.is_here and facts.model.num_parameters is None:
            words = tr(
                "{directory} has no weight files; from config.json alone covey knows the size only of the "
                "families {families}, not of {model_type}",
                directory=directory,
                families=joined(", ", FAMILIES),
                model_type=facts.model.type,
            )
            facts = _lacking(facts, words, FaultDetails(cause="headers", subject=str(directory)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        words = tr("a .safetensors file of {directory} is damaged: {error}", directory=directory, error=error)
        facts = _lacking(facts, words, FaultDetails(cause="damaged", subject=str(directory)))
    return _with_codec(facts, config, directory, adapter)


def details_of(error: ModelError | TemplateError) -> FaultDetails:
    """Return the details that an error carries beside its words."""
    if isinstance(error, TemplateError):
        return FaultDetails(cause=error.kind, subject="chat_template" if error.names_option else "")
    return FaultDetails(cause=error.kind, subject=error.subject)


def _with_problem(facts: Facts, problem: ModelProblem, directory: Path) -> Facts:
    fault = _FAULTS.get(problem.kind, "missing")
    details = FaultDetails(cause=problem.kind, subject=str(directory), command=problem.command)
    return replace(facts, model=replace(facts.model, problem=problem.words, fault=fault, details=details))


def _lacking(facts: Facts, words: str, details: FaultDetails) -> Facts:
    return replace(facts, model=replace(facts.model, problem=words, fault="missing", details=details))


def _stored_quantization(directory: Path) -> dict[str, Any] | None:
    try:
        return stored_options(read_json(directory / "config.json"))
    except (OSError, ValueError):
        return None  # said as what is wrong with the model


def _shapes(directory: Path) -> ModelShapes:
    """The tensors of a model; of one that is stored packed those that its config.json describes, where its
    family is known."""
    described = read_json(directory / "config.json")
    if stored_options(described) is None:
        return read_shapes(directory)
    return shapes_of_config(described) or ModelShapes(tensors={}, vocab_size=None, tied=False)


def _with_live(facts: Facts, config: Config, live: LiveModel) -> Facts:
    directory = live.directory
    problem = model_problem(directory, with_weights=False)
    if problem is not None and not (problem.kind == "remote_code" and config.trust_remote_code):
        facts = _with_problem(facts, problem, directory)
        facts = replace(
            facts,
            model=replace(
                facts.model,
                problem=replaced(problem.words, str(directory), config.model),
                details=replace(facts.model.details, subject=config.model),
            ),
        )
    else:
        facts = _with_sizes(_with_config(facts, directory), config, directory, live.shapes)
        held = live.bytes_on("cuda" if facts.machine.cuda else "cpu")
        if facts.machine.free_memory_bytes is not None:
            facts = replace(
                facts,
                machine=replace(facts.machine, free_memory_bytes=facts.machine.free_memory_bytes + held),
            )
    return facts


def _with_config(facts: Facts, directory: Path) -> Facts:
    described = read_json(directory / "config.json")
    return replace(
        facts,
        model=replace(
            facts.model,
            type=described.get("model_type"),
            context=model_context(directory),
            image_processor=preparation_of(directory),
        ),
    )


def _with_fit(facts: Facts, directory: Path) -> Facts:
    """Whether the tensors of the files are those of config.json."""
    fit = fit_of(directory, read_json(directory / "config.json"), stored_tensors(directory))
    facts = replace(facts, model=replace(facts.model, unused_tensors=fit.unused))
    if fit.problem is None:
        return facts
    return replace(
        facts,
        model=replace(
            facts.model,
            problem=tr("{directory}: {problem}", directory=directory, problem=fit.problem),
            fault="weights",
            details=FaultDetails(subject=str(directory)),
        ),
    )


def _located(config: Config, *, offline: bool) -> tuple[Path, bool]:
    """The directory, and whether its weights have to be there already."""
    if config.model in BUILT_IN:
        return BUILT_IN[config.model].model_dir, True
    files = locate_model(config.model, revision=config.model_revision, use_hf=config.use_hf, offline=offline)
    return files.directory, files.revision is None


def _with_codec(
    facts: Facts, config: Config, directory: Path, adapter: Path | None
) -> tuple[Facts, TextCodec | None]:
    """The facts with those of the tokenizer and the chat template, whatever else is wrong with the model."""
    try:
        codec = load_codec(
            directory,
            chat_template=config.chat_template,
            enable_thinking=config.enable_thinking,
            chat_template_kwargs=config.chat_template_kwargs,
            adapter=adapter or adapter_directory(config),
            images=ImageOptions(
                max_pixels=config.max_pixels,
                max_tokens=config.image_max_token_num,
                may_fetch=config.allow_image_urls,
            ),
        )
    except TemplateError as error:
        return replace(
            facts, template=replace(facts.template, problem=str(error), details=details_of(error))
        ), None
    except (ModelError, OSError, ValueError) as error:
        if isinstance(error, ModelError) and error.kind == "image_limits":
            limits = DataProblem(words=str(error), option="max_pixels")
            return replace(facts, data=replace(facts.data, problem=limits)), None
        if facts.model.problem is None:
            names = isinstance(error, ModelError | OSError)
            facts = _lacking(facts, str(error), FaultDetails(subject=str(directory) if names else ""))
        return facts, None
    rows = vocabulary_of(directory)
    facts = replace(
        facts, model=replace(facts.model, embedding_rows=rows, tokens_beyond=codec.tokens_beyond(rows))
    )
    has_template, odd = codec.chat_template is not None, prompt_problem(codec)
    facts = replace(
        facts,
        template=replace(
            facts.template,
            stop_tokens=stop_tokens_in_words(codec),
            is_there=has_template,
            prompt_problem=None if odd is None else odd.words,
            answer_opening="" if odd is None else odd.opening,
            # A model was trained with its own template, whatever that writes.
            unwritten_prefix="" if config.chat_template is None else unwritten_prefix(codec),
            banned_tokens=banned_tokens_in_words(codec),
            unstoppable_turn=codec.unstoppable,
            hidden_stop_words=stop_words(codec, config.stop_words).hidden,
        ),
        model=replace(facts.model, unused_sampling=_unused_sampling(config, directory)),
    )
    return facts, codec


def stand_in_codec(facts: Facts, config: Config) -> tuple[Facts, TextCodec]:
    """The tokenizer of a built-in model that sees images where this one does, to look at data with, under the
    chat template that was asked for where that can be used; the facts say why where it cannot."""
    directory = BUILT_IN["quickstart-shapes" if facts.model.type in SEEING else "quickstart"].model_dir
    if facts.template.problem is not None:
        return facts, load_codec(directory)
    try:
        return facts, load_codec(
            directory,
            chat_template=config.chat_template,
            enable_thinking=config.enable_thinking,
            chat_template_kwargs=config.chat_template_kwargs,
        )
    except TemplateError as error:
        facts = replace(
            facts, template=replace(facts.template, problem=str(error), details=details_of(error))
        )
        return facts, load_codec(directory)


def _unused_sampling(config: Config, directory: Path) -> tuple[tuple[str, float], ...]:
    """Return (name, value) of the settings of generation_config.json that differ from those of the run."""
    said = read_json(directory / "generation_config.json")
    followed = {name: getattr(config, name) for name in ("temperature", *FILTERS)} | _OFF
    return tuple(
        (name, said[name])
        for name, value in followed.items()
        if isinstance(said.get(name), int | float) and not _is_same(said[name], value)
    )


def _is_same(said: float, value: float) -> bool:
    """Whether two settings are one; -1 tokens are all, as 0 are."""
    return max(said, 0) == value


def _with_sizes(facts: Facts, config: Config, directory: Path, shapes: ModelShapes) -> Facts:
    if not facts.layout.is_here and model_problem(directory) is not None:
        shapes = shapes_of_config(read_json(directory / "config.json")) or shapes
    if not shapes.tensors:
        return facts
    described = facts_of(shapes, _adapter_settings(config))
    found = None if lora_settings(config) is None else described
    facts = with_adapter(facts, config, shapes)
    count = sum(_numel(shape) for shape in shapes.tensors.values())
    parts = part_facts(config, shapes, found)
    frozen = sum(part.num_parameters for part in parts if not part.is_trained) if found is None else 0
    sizes = checkpoint_sizes(
        config,
        directory,
        shapes,
        found,
        num_processes=facts.launch.num_processes,
        has_bfloat16=bool(facts.machine.cuda),
    )
    facts = replace(
        facts,
        model=replace(
            facts.model,
            num_parameters=count,
            num_trained=count - frozen if found is None else found.num_lora + found.num_saved,
            parts=parts,
            sizes=model_sizes(directory, shapes, described, config.frozen_parts),
        ),
        output=replace(facts.output, checkpoint_bytes=sizes.whole, model_bytes=sizes.model),
    )
    if found is None or config.adapters is not None:
        return facts
    return replace(
        facts,
        lora=replace(
            facts.lora,
            unmatched_targets=tuple(
                TargetFacts(target=n, nearest=near) for n, near in found.unmatched.items()
            ),
            untrainable_targets=tuple(found.refused.items()),
        ),
    )


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count
