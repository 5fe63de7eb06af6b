"""Templates, tokens and end tokens, against transformers' AutoTokenizer on the same directory."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from covey.data.text import TemplateError, load_codec, model_context, model_problem
from covey.quickstart.task import MODEL_DIR

CONVERSATIONS = [
    [{"role": "user", "content": "What is 12+34?"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "  café 你好\n\n"}],
    [
        {"role": "user", "content": "<think>a</think> {{ x }} {% y %} <|im_end|>"},
        {"role": "assistant", "content": "<answer>1</answer>"},
        {"role": "user", "content": ""},
    ],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_the_embedded_template_renders_as_transformers_does(messages, codec):
    theirs = AutoTokenizer.from_pretrained(MODEL_DIR)
    text = codec.render(messages)
    assert text == theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>assistant\n")
    (ids,) = codec.encode([text])
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(ids) == expected
    assert codec.decode(ids) == theirs.decode(expected, skip_special_tokens=True)
    assert "<|im_start|>" not in codec.decode(ids)


# What templates in the wild do, each in one line.
TEMPLATES = {
    "blocks trimmed": (
        "{% for m in messages %}\n    {% if m['role'] == 'user' %}\n{{ m['content'] }}\n    {% endif %}\n"
        "{% endfor %}\n"
    ),
    "special tokens": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}x{% endfor %}",
    "json": "{{ messages | tojson }}",
    "json indented": "{{ messages | tojson(indent=2) }}",
    "json in ascii": "{{ messages | tojson(ensure_ascii=False) }}",
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    ),
    "tools is defined": "{% if tools is defined and tools %}T{% else %}none{% endif %}",
    "tools is not none": "{% if tools is not none %}T {{ tools | tojson }}{% else %}none{% endif %}",
    "documents is none": "{{ 'none' if documents is none else 'D' }}",
    "generation prompt": "{% if add_generation_prompt %}go{% endif %}",
    "optional argument": (
        "{% if enable_thinking is defined and enable_thinking is false %}no{% else %}yes{% endif %}"
    ),
    "string methods": "{{ messages[0]['content'].strip().split('+')[-1].upper() }}",
    "marked answers": (
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS[1:])
def test_templates_render_as_transformers_does(name, messages, model_dir):
    directory = model_dir(template=TEMPLATES[name])
    theirs = AutoTokenizer.from_pretrained(directory)
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert load_codec(directory).render(messages) == expected


def test_a_template_in_the_tokenizers_settings(model_dir):
    one = model_dir(tokenizer_config={"chat_template": "A {{ messages[0]['content'] }}"})
    (one / "chat_template.jinja").unlink()
    assert load_codec(one).render(CONVERSATIONS[0]) == "A What is 12+34?"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    many = model_dir(tokenizer_config={"chat_template": named})
    (many / "chat_template.jinja").unlink()
    assert load_codec(many).render(CONVERSATIONS[0]) == "D"


def test_a_template_that_refuses_says_why(model_dir):
    codec = load_codec(model_dir(template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(TemplateError, match="roles must alternate"):
        codec.render(CONVERSATIONS[0])


def test_a_broken_template_is_found_on_loading(model_dir):
    directory = model_dir(template="{% for m in %}")
    with pytest.raises(TemplateError, match="broken"):
        load_codec(directory)


def test_a_template_cannot_reach_the_machine(model_dir):
    codec = load_codec(model_dir(template="{{ messages.__class__.__mro__ }}"))
    with pytest.raises(TemplateError):
        codec.render(CONVERSATIONS[0])
    codec = load_codec(model_dir(template="{{ messages.append(1) }}"))
    with pytest.raises(TemplateError):
        codec.render(CONVERSATIONS[0])


def test_no_template(model_dir):
    directory = model_dir()
    (directory / "chat_template.jinja").unlink()
    codec = load_codec(directory)
    assert codec.chat_template is None
    with pytest.raises(TemplateError, match="no chat template"):
        codec.render(CONVERSATIONS[0])


# -- tokens ------------------------------------------------------------------------------------------------


def test_texts_are_encoded_alone(codec):
    texts = ["1", "1234567", "", "é 你好"]
    assert codec.encode(texts) == [codec.encode([t])[0] for t in texts]
    assert [len(ids) for ids in codec.encode(texts)[:3]] == [1, 7, 0]
    assert codec.encode([]) == []


def test_padding_and_truncation_left_in_a_tokenizer_file_are_not_applied(model_dir, codec):
    # A tokenizer that was saved after a padded, truncated call keeps both in its file; transformers resets
    # them.
    directory = model_dir()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_padding(length=16)
    tokenizer.enable_truncation(max_length=4)
    tokenizer.save(str(directory / "tokenizer.json"))
    texts = ["1", "123456789"]
    assert [len(ids) for ids in codec.encode(texts)] == [1, 9]
    assert load_codec(directory).encode(texts) == codec.encode(texts)


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        load_codec(tmp_path)


# -- end tokens --------------------------------------------------------------------------------------------


def test_end_tokens_are_the_union_of_all_three_places(model_dir, codec):
    end = codec.tokenizer.token_to_id("<|im_end|>")
    start, pad = (codec.tokenizer.token_to_id(t) for t in ("<|im_start|>", "<|endoftext|>"))
    assert codec.stop_token_ids == (end,)
    changed = model_dir(
        generation_config={"eos_token_id": [7, start]},
        config={"eos_token_id": 3},
        tokenizer_config={"eos_token": "<|endoftext|>"},
    )
    assert load_codec(changed).stop_token_ids == tuple(sorted({7, start, 3, pad}))
    spelled_out = model_dir(
        generation_config={"eos_token_id": None},
        config={"eos_token_id": None},
        tokenizer_config={"eos_token": {"content": "<|endoftext|>", "lstrip": False}},
    )
    assert load_codec(spelled_out).stop_token_ids == (pad,)


def test_no_end_token_anywhere(model_dir):
    nothing = {"eos_token_id": None}
    directory = model_dir(generation_config=nothing, config=nothing, tokenizer_config={"eos_token": None})
    assert load_codec(directory).stop_token_ids == ()


def test_end_tokens_without_a_generation_config(model_dir, codec):
    directory = model_dir()
    (directory / "generation_config.json").unlink()
    assert load_codec(directory).stop_token_ids == codec.stop_token_ids


# -- directories -------------------------------------------------------------------------------------------


def test_what_is_wrong_with_a_directory(model_dir, tmp_path):
    assert model_problem(MODEL_DIR) is None
    assert "not a directory" in model_problem(tmp_path / "nowhere")
    directory = model_dir()
    assert ".safetensors" in model_problem(directory)
    (directory / "model.safetensors").touch()
    assert model_problem(directory) is None
    (directory / "config.json").write_text("{")
    assert "no JSON" in model_problem(directory)
    (directory / "tokenizer.json").unlink()
    assert "no tokenizer.json" in model_problem(directory)
    (directory / "config.json").unlink()
    assert "no config.json" in model_problem(directory)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 99}, "max_position_embeddings": 5}, 99),
        ({}, None),
    ],
)
def test_the_models_context(config, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_context(tmp_path) == expected
