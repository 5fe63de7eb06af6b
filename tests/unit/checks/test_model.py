"""What is said of the model, its template, code, adapters, device, packages and prompts."""

from dataclasses import replace
from typing import Any

import pytest

from covey.models.adapter_shapes import LoraSettings, ModelShapes, facts_of
from covey.plan.facts import Facts, FaultDetails, ModelFault, TargetFacts
from covey.types import Problem
from support.checks import Case, assert_fixes_mend, assert_says, changed, config, edits_of, facts, found, one

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LORA = {"tuner_type": "lora", "learning_rate": 1e-5}


def broken(fault: ModelFault | None) -> Facts:
    return facts(model={"problem": "seen so", "fault": fault})


def unmatched(target: str, *nearest: str) -> Facts:
    return facts(lora={"unmatched_targets": (TargetFacts(target=target, nearest=nearest),)})


def untrainable(*targets: tuple[str, str]) -> Facts:
    return facts(lora={"untrainable_targets": targets})


CASES = [
    Case(
        code="W118",
        option="chat_template",
        words="The template ends an answer with <|im_end|>, for which the tokenizer has no token. "
        "Completions end at: </s> (2; config).",
        facts=facts(template={"unstoppable_turn": "<|im_end|>", "stop_tokens": "</s> (2; config)"}),
    ),
    Case(code="E109", option="stop_words", words="contains </s>, a special token",
         facts=facts(template={"hidden_stop_words": (("</s>a", "</s>"),)}),
         options={"stop_words": ["b", "</s>a", "</s>"]}),
    Case(code="E109", option="stop_words", words="stop_words has 65 texts",
         options={"stop_words": ["a"] * 65}),
    Case(code="E109", option="stop_words", words="the longest with 2,000 characters",
         options={"stop_words": ["a" * 2000]}),
    Case(code="W123", option="chat_template", words="The tokenizer puts <bos> in front of every plain "
         "text, but prompts made with mine.jinja do not begin with it.",
         facts=facts(template={"unwritten_prefix": "<bos>"}), options={"chat_template": "mine.jinja"}),
    Case(code="E115", option="trust_remote_code", words="model_revision is main",
         options={"model": "org/model", "trust_remote_code": True, "model_revision": "main"}),
    Case(code="E317", option="target_modules", words="lm_head cannot be trained this way: the head.",
         facts=untrainable(("lm_head", "the head")),
         options={**LORA, "target_modules": ["lm_head", "q_proj"]}),
    Case(code="E317", option="target_modules", words="lm_head cannot be trained this way",
         facts=untrainable(("lm_head", "the head")), options={**LORA, "target_modules": ["lm_head"]}),
    Case(code="E317", option="modules_to_save", words="embed_tokens cannot be trained this way",
         facts=untrainable(("embed_tokens", "one tensor")),
         options={**LORA, "modules_to_save": ["embed_tokens", "norm"]}),
    Case(code="E317", option="modules_to_save", words="embed_tokens cannot be trained this way",
         facts=untrainable(("embed_tokens", "one tensor")),
         options={**LORA, "modules_to_save": ["embed_tokens"]}),
    Case(code="W102", option="torch_dtype", words="this CPU has no instructions",
         facts=facts(machine={"cuda": False, "has_bfloat16": False}), options={"torch_dtype": "bf16"}),
    Case(code="W151", option="model", words="4 tensors of m are not loaded: a, b, c and 1 more",
         facts=facts(model={"unused_tensors": ("a", "b", "c", "d")}), options={"model": "m"}),
    Case(code="W109", option="apply_chat_template", words="is not applied",
         facts=facts(prompts={"are_text": True})),
    Case(code="W112", option="learning_rate", words="is 1e-06 and the model has 0.83 M parameters",
         facts=facts(model={"num_parameters": 831_000})),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_says_and_mends(case: Case) -> None:
    assert_says(case)
    assert_fixes_mend(case)


@pytest.mark.parametrize(
    ("fault", "cause", "model", "advice"),
    [
        ("missing", "missing_shards", "models/tiny", "hf download ID --local-dir models/tiny"),
        ("missing", "damaged", "models/tiny", "download or copy that file again"),
        ("missing", "no_tokenizer", "models/tiny", "from the base model to models/tiny"),
        ("missing", "slow_tokenizer", "models/tiny", "from the base model to models/tiny"),
        ("missing", "no_config", "models/tiny", "give the directory that holds"),
        ("missing", "no_weights", "models/tiny", "give the directory that holds"),
        ("kind", "adapter", "runs/a/checkpoint-5", "the adapter's directory as --adapters"),
        ("kind", "unknown_model_type", "models/tiny", "pip install -U transformers"),
        ("format", "pickled_weights", "models/tiny", "M.from_pretrained('models/tiny')"),
        ("hub", "offline", "org/m", "hf download org/m"),
        ("hub", "", "hf::org/m", "hf download org/m`, then"),
        (
            "template",
            "unreadable_template",
            "models/tiny",
            "name an existing file: --chat_template FILE",
        ),
        ("template", "refusing_template", "models/tiny", "use a template that accepts these messages"),
    ],
)
def test_what_to_do_about_a_fault_of_the_model(
    fault: ModelFault, cause: str, model: str, advice: str
) -> None:
    def said(subject: str) -> Problem:
        details = FaultDetails(cause=cause, subject=subject)
        if fault == "template":
            return one(facts(template={"problem": "seen so", "details": details}), model=model)
        return one(facts(model={"problem": "seen so", "fault": fault, "details": details}), model=model)

    assert advice in said(model).fixes[0].text
    # Whose fault it is is said, and once.
    assert said(model).seen == "seen so" and said("/cache/m").seen == f"{model}: seen so"


def test_a_plan_for_another_machine_is_of_this_model() -> None:
    details = FaultDetails(cause="headers", subject="models/moe")
    given = facts(model={"problem": "it has no weight files", "fault": "missing", "details": details})
    here = replace(given, layout=replace(given.layout, is_here=True))
    there = replace(given, layout=replace(given.layout, is_here=False))
    assert {"model": "quickstart"} in edits_of(one(here, model="models/moe"))
    problem = one(there, model="models/moe")
    assert edits_of(problem) == [{}] and "*.safetensors" in problem.fixes[0].text


def test_a_template_that_an_option_gives_is_that_option_s() -> None:
    details = FaultDetails(cause="unreadable_template", subject="chat_template")
    problem = one(facts(template={"problem": "chat_template x cannot be read", "details": details}))
    assert problem.seen == "chat_template x cannot be read"


def test_shards_are_gathered_by_their_command() -> None:
    details = FaultDetails(cause="shards", subject="models/tiny", command="python gather.py")
    problem = one(facts(model={"problem": "shards", "fault": "shards", "details": details}))
    assert problem.fixes[0].text.startswith("if you trust the files: `python gather.py`; then copy")


def test_code_that_has_been_read_is_trusted_where_it_lies() -> None:
    words = "models/tiny is a model whose code comes with it"
    here = FaultDetails(cause="remote_code", subject="models/tiny")
    given = facts(model={"problem": words, "fault": "code", "details": here})
    problem = one(given)
    assert problem.seen == words
    assert edits_of(problem) == [{"trust_remote_code": True}, {}]
    assert_fixes_mend(Case(code="E318", option="model", words="code", facts=given))
    # A model of a hub needs its commit too, which nobody can guess.
    fetched = changed(given, model={"details": FaultDetails(cause="remote_code", subject="/cache/m")})
    fixes = one(fetched, model="org/m").fixes
    assert "--model_revision COMMIT" in fixes[0].text
    assert fixes[0].edits == {}


def test_a_path_is_not_looked_for_on_a_hub() -> None:
    assert one(broken("hub"), model="./absent").code == "E301"
    assert one(broken("hub"), model="a/b/c").code == "E301"
    assert one(broken("hub"), model="org/m").code == "E321"


def test_the_nearest_name_takes_the_place_of_a_misspelt_one() -> None:
    given = unmatched("q_pro", "q_proj", "o_proj")
    assert edits_of(one(given, **LORA, target_modules=["v_proj", "q_pro"])) == [
        {"target_modules": ["v_proj", "q_proj"]},
        {"target_modules": ["all-linear"]},
    ]
    saved = unmatched("lm_haed", "lm_head")
    assert edits_of(one(saved, **LORA, modules_to_save=["lm_haed"])) == [{"modules_to_save": ["lm_head"]}, {}]


SHAPES = ModelShapes(
    tensors={
        "model.embed_tokens.weight": (320, 64),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
        "model.layers.0.self_attn.v_proj.weight": (32, 64),
        "model.norm.weight": (64,),
    },
    vocab_size=320,
    tied=True,
)


@pytest.mark.parametrize(
    ("targets", "saved", "num_problems"),
    [
        (["q_pro"], [], 1),
        (["q_proj", "v_prj"], [], 1),
        (["q_pro", "v_prj"], [], 2),
        (["xyz"], [], 1),
        (["lm_head"], [], 1),
        (["q_proj", "norm"], [], 1),
        (["all-linear", "q_proj"], [], 1),
        (["q_proj"], ["nrm"], 1),
        (["q_proj"], ["lm_head"], 1),
        (["q_proj"], ["lm_head", "norm"], 1),
        # Both halves of a tied pair, alone and beside names that work or are misspelt.
        (["q_proj"], ["embed_tokens", "lm_head"], 2),
        (["q_proj"], ["embed_tokens", "norm", "lm_head"], 2),
        (["q_proj"], ["lm_haed"], 1),
        (["q_proj"], ["embed_tokens", "nrm"], 2),
        (["embed_tokens", "lm_head"], [], 2),
        (["embed_tokens", "q_pro", "norm"], [], 3),
    ],
)
def test_targets_of_a_fix_fit_the_model(targets: list[str], saved: list[str], num_problems: int) -> None:
    def said(**options: Any) -> list[Any]:
        asked = config(**{**LORA, **options})
        settings = LoraSettings(
            rank=8,
            alpha=16,
            target_modules=tuple(asked.target_modules),
            modules_to_save=tuple(asked.modules_to_save),
        )
        on_model = facts_of(SHAPES, settings)
        near = tuple(TargetFacts(target=n, nearest=names) for n, names in on_model.unmatched.items())
        refused = tuple(on_model.refused.items())
        return found(
            facts(lora={"unmatched_targets": near, "untrainable_targets": refused}), **{**LORA, **options}
        )

    options = {"target_modules": targets, "modules_to_save": saved}
    problems = said(**options)
    assert [p.code for p in problems] == ["E317"] * num_problems
    for problem in problems:
        for edits in edits_of(problem):
            if edits:
                # Of the other names of the option, too.
                again = [p.seen for p in said(**{**options, **edits})]
                assert again == []


def test_code_of_a_model_needs_a_full_commit_unless_it_lies_here() -> None:
    trusted = {"trust_remote_code": True, "model": "org/model"}
    assert found(**trusted, model_revision=COMMIT) == []
    assert one(**trusted, model_revision=COMMIT[:12]).code == "E115"
    for local in ("/models/m", "./m", "../m", "~/m", "quickstart"):
        assert found(**{**trusted, "model": local}) == []
    # A directory, though its path looks like an id of a hub.
    assert found(facts(model={"directory": "org/model"}), **trusted) == []


def test_data_types_that_the_device_has() -> None:
    for wanted in ("auto", "float32", "bfloat16"):
        assert found(torch_dtype=wanted) == []
    assert found(facts(machine={"cuda": False, "has_bfloat16": True}), torch_dtype="bf16") == []
    assert found(facts(machine={"cuda": False, "has_bfloat16": False}), torch_dtype="auto") == []


def test_what_is_not_known_of_the_device_is_not_said() -> None:
    assert found(facts(machine={"cuda": True, "has_bfloat16": None}), torch_dtype="bf16") == []
    assert found(facts(machine={"cuda": None, "has_bfloat16": None}), torch_dtype="bf16") == []
    assert found(facts(machine={"cuda": False, "has_bfloat16": None}), torch_dtype="bf16") == []


def test_every_missing_package_is_named() -> None:
    both = (("report_to", "wandb"), ("report_to", "mlflow"))
    problems = found(facts(machine={"missing_packages": both}), report_to=["wandb", "mlflow"])
    assert [p.fixes[0].text for p in problems] == ["`pip install wandb`", "`pip install mlflow`"]


def test_plain_prompts() -> None:
    assert found(facts(prompts={"are_text": True}, template={"is_there": False})) == []
    assert found(facts(prompts={"are_text": True}), apply_chat_template=True) == []


@pytest.mark.parametrize(
    ("num_parameters", "rate", "is_said"),
    [
        (49_999_999, 1e-6, True),
        (50_000_000, 1e-6, False),
        (831_000, 9.9e-6, True),
        (831_000, 1e-5, False),
        (None, 1e-6, False),
    ],
)
def test_small_models(num_parameters: int | None, rate: float, is_said: bool) -> None:
    said = [p.code for p in found(facts(model={"num_parameters": num_parameters}), learning_rate=rate)]
    assert said == (["W112"] if is_said else [])


def test_a_stop_word_ends_a_turn_as_a_token_does() -> None:
    given = facts(template={"unstoppable_turn": "<|im_end|>", "is_there": True})
    (problem,) = found(given, stop_words=["Q:"])
    assert problem.fixes[0].edits == {"stop_words": ["Q:", "<|im_end|>"]}
    assert found(given, stop_words=["Q:", "<|im_end|>"]) == found(given, stop_words=["|im_end|"]) == []


def test_an_end_of_turn_matters_where_the_template_is_used() -> None:
    given = facts(template={"unstoppable_turn": "</s>", "is_there": True}, prompts={"are_text": True})
    assert [p.code for p in found(given)] == ["W109"]
    assert [p.code for p in found(given, apply_chat_template=True)] == ["W118"]
    given = facts(template={"unwritten_prefix": "<bos>", "is_there": True}, prompts={"are_text": True})
    assert [p.code for p in found(given)] == ["W109"]
    assert [p.code for p in found(given, apply_chat_template=True)] == ["W123"]
