"""A model that a program holds: what is refused, and that it is given back as it was, but for its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from covey.models.adapter_shapes import LoraSettings
from covey.models.live import fold_adapter, lent, live_model
from covey.models.load import load_adapted, load_policy
from covey.quickstart.task import MODEL_DIR
from support import vision

Model = Any
CPU = torch.device("cpu")


def loaded(**options: Any) -> Model:
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR, **options)


def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(MODEL_DIR)


def _with_adapter(model: Model) -> Model:
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))


def _under_adapter(model: Model) -> Model:
    _with_adapter(model)
    return model


def _untied(model: Model) -> Model:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def _shorter(model: Model) -> Model:
    del model.model.layers[-1]
    return model


def _odd_generation(model: Model) -> Model:
    model.generation_config.max_new_tokens = -1
    model.generation_config.num_beams = 0
    return model


def _renamed(model: Model) -> Model:
    model.__class__ = type("MyModel", (type(model),), {})
    return model


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_with_adapter, "adapters of peft"),
        (_under_adapter, "adapters of peft"),
        (lambda model: nn.Sequential(model.lm_head), "is a Sequential"),
        (lambda model: model.model, "is a Qwen2Model, but AutoModelForCausalLM"),
        (_renamed, "is a MyModel, but AutoModelForCausalLM"),
        (lambda model: model.to("meta"), "are on meta"),
        (_untied, "tie_word_embeddings is True, but head and embedding of the model are two tensors"),
        (_shorter, "12 tensors of the model do not match model.config: model.layers.3"),
        (lambda model: model.bfloat16(), "inv_freq of the model is bfloat16"),
        (_odd_generation, "cannot save the configuration of the model: ValueError"),
    ],
)
def test_refused(spoil: Callable[[Model], Model], words: str, tmp_path: Path) -> None:
    _, live, faults = live_model(spoil(loaded()), tokenizer(), tmp_path)
    assert live is None
    assert [fault.option for fault in faults] == ["model"] and words in faults[0].seen, faults


def test_a_tokenizer_of_another_kind(tmp_path: Path) -> None:
    _, live, faults = live_model(_untied(loaded()), 7, tmp_path)
    assert live is None and [fault.option for fault in faults] == ["model", "tokenizer"]
    assert "tokenizer is of type int" in faults[1].seen


def test_files(tmp_path: Path) -> None:
    """What a checkpoint is given beside the weights."""
    _, live, _ = live_model(loaded(), MODEL_DIR, tmp_path)
    assert live is not None and live.bytes_on("cuda") == 0 < live.bytes_on("cpu")
    assert (tmp_path / "tokenizer.json").read_bytes() == (MODEL_DIR / "tokenizer.json").read_bytes()
    names = {path.name for path in tmp_path.iterdir()}
    assert {"chat_template.jinja", "config.json", "generation_config.json"} <= names


def test_names_tell_weights_and_no_dtypes(tmp_path: Path) -> None:
    def name(model: Model) -> str:
        return live_model(model, tokenizer(), tmp_path)[0]

    first = name(loaded())
    assert first.startswith("object Qwen2ForCausalLM (checksum ")
    low = loaded(dtype=torch.bfloat16)
    assert name(low) == name(low.float()) != first
    moved = loaded()
    with torch.no_grad():
        moved.model.norm.weight += 1e-3
    assert name(moved) != first


def state_of(model: Model) -> dict[str, Any]:
    """All that a program can see of a model, but for its weights."""
    return {
        "kinds": [(name, type(module)) for name, module in model.named_modules()],
        "settings": [
            {n: v for n, v in vars(module).items() if isinstance(v, bool | int | float | str)}
            for module in model.modules()
        ],
        "attention": model.config._attn_implementation,
        "gradients": [(n, p.requires_grad, p.grad is None) for n, p in model.named_parameters()],
        "forwards": [name for name, module in model.named_modules() if "forward" in vars(module)],
    }


def with_dropout() -> Model:
    model = loaded(attn_implementation="eager").eval()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.25
    return model


def test_given_back(tmp_path: Path) -> None:
    model = with_dropout()
    before, weights = state_of(model), [p.detach().clone() for p in model.parameters()]
    model.model.norm.weight.grad = torch.ones(128)
    with lent(model):
        policy = load_policy(model, device=CPU, disable_dropout=True)
        policy.keep_activations("full")
        policy.use_stream("packed")
        assert policy.model is model and model.model.norm.weight.grad is None
        assert state_of(model) != before
        with torch.no_grad():
            model.model.norm.weight += 1.0
    assert state_of(model) == before
    moved = [not torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True)]
    assert sum(moved) == 1
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


def test_given_back_with_its_weights() -> None:
    model = loaded(dtype=torch.bfloat16)
    weights = [p.detach().clone() for p in model.parameters()]
    with lent(model, keep_weights=True):
        load_policy(model, device=CPU, disable_dropout=True)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(
        torch.equal(p, w) and p.dtype == w.dtype for p, w in zip(model.parameters(), weights, strict=True)
    )


@pytest.mark.parametrize("saved", [(), ("layers.0.self_attn.q_proj",)])
@pytest.mark.parametrize("fails", [False, True])
def test_adapters_are_folded_in(saved: tuple[str, ...], fails: bool) -> None:
    """What an adapter has learnt is in the weights; of one whose run never began nothing is left."""
    model = loaded().eval()
    before, tokens = state_of(model), torch.tensor([[1, 2, 3, 4]])
    first = model(tokens).logits.detach()
    settings = LoraSettings(rank=2, alpha=4.0, target_modules=("v_proj",), modules_to_save=saved)
    options: dict[str, Any] = {"adapter": None, "seed": 0, "compute_dtype": torch.float32, "device": CPU}
    with lent(model):
        policy = load_adapted(model, settings, **options, disable_dropout=True, kernels="torch")
        with torch.no_grad():
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    parameter += 0.01
        changed = model.eval().set_attn_implementation("sdpa") or model(tokens).logits.detach()
        if not fails:
            fold_adapter(policy)
    assert state_of(model) == before
    after = model(tokens).logits.detach()
    assert not torch.allclose(changed, first, atol=1e-3)
    torch.testing.assert_close(after, first if fails else changed, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_half", [True, False])
def test_a_cast_that_stops_halfway_is_taken_back(is_half: bool) -> None:
    model = loaded(dtype=torch.bfloat16)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    parameters = list(model.parameters())
    with pytest.raises(KeyboardInterrupt), lent(model):
        for parameter in parameters[: len(parameters) // 2 if is_half else None]:
            parameter.data = parameter.data.float()
        raise KeyboardInterrupt
    dtypes = {p.dtype for p in model.parameters()}
    assert dtypes == {torch.bfloat16 if is_half else torch.float32}
    assert all(torch.equal(p.to(before[n].dtype), before[n]) for n, p in model.named_parameters())


def test_a_tied_model_that_sees_and_what_prepares_its_images(tmp_path: Path) -> None:
    """Its configuration says so for the whole, as that of Qwen2.5-VL 3B."""
    config = vision.config_of("qwen2_5_vl")
    config.tie_word_embeddings = True
    del config.text_config.tie_word_embeddings
    model = transformers.AutoModelForImageTextToText.from_config(config).float()
    model.tie_weights()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    files = vision.save_model("qwen2_5_vl", tmp_path / "files")

    def made(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    _, found, faults = live_model(model, files, made("made"))
    assert found is not None and faults == []
    _, found, faults = live_model(model, transformers.AutoTokenizer.from_pretrained(files), made("without"))
    assert found is None and [fault.option for fault in faults] == ["tokenizer"]
    assert "does not say how they are prepared" in faults[0].seen
