"""Templates, tokens and end tokens, against transformers' AutoTokenizer on the same directory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from covey.data.errors import ModelError, TemplateError
from covey.data.prompt_checks import prompt_problem, unwritten_prefix
from covey.data.template import CHATML, compiled
from covey.data.text import load_codec
from covey.data.token_words import stop_tokens_in_words
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


def test_a_template_cannot_reach_the_machine(model_dir):
    codec = load_codec(model_dir(template="{{ messages.__class__.__mro__ }}"))
    with pytest.raises(TemplateError):
        codec.render(CONVERSATIONS[0])
    codec = load_codec(model_dir(template="{{ messages.append(1) }}"))
    with pytest.raises(TemplateError):
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


def test_a_broken_tokenizer_is_named(model_dir):
    directory = model_dir()
    (directory / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer: "):
        load_codec(directory)


# -- what a tokenizer puts in front ------------------------------------------------------------------------


def with_bos(directory, *, also_end=False):
    """Give a model directory's tokenizer a post-processor that adds <|endoftext|> in front."""
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    token = "<|endoftext|>"
    tokenizer.post_processor = TemplateProcessing(
        single=f"{token} $A {token}" if also_end else f"{token} $A",
        special_tokens=[(token, tokenizer.token_to_id(token))],
    )
    tokenizer.save(path)
    return directory


def test_a_raw_text_begins_with_the_tokenizers_own_bos_once(model_dir, codec):
    bos = codec.tokenizer.token_to_id("<|endoftext|>")
    assert codec.prefix_ids == ()
    assert codec.encode(["12"], add_special_tokens=True) == codec.encode(["12"])
    own = load_codec(with_bos(model_dir()))
    plain = codec.encode(["12"])[0]
    assert own.encode(["12", "<|endoftext|>12"], add_special_tokens=True) == [(bos, *plain)] * 2
    assert own.encode(["12"]) == [plain]


def test_nothing_is_added_at_the_end(model_dir, codec):
    # A prompt that ends with an end token is a prompt that is over.
    own = load_codec(with_bos(model_dir(), also_end=True))
    bos = codec.tokenizer.token_to_id("<|endoftext|>")
    assert own.encode(["12"], add_special_tokens=True) == [(bos, *codec.encode(["12"])[0])]


@pytest.mark.parametrize("says", [True, False, None])
@pytest.mark.parametrize("prepare", [with_bos, lambda directory: directory])
def test_raw_texts_are_encoded_as_transformers_does(says, prepare, model_dir):
    # The file's post-processor decides, whatever add_bos_token says.
    directory = prepare(model_dir(tokenizer_config={"bos_token": "<|im_start|>", "add_bos_token": says}))
    theirs = AutoTokenizer.from_pretrained(directory)
    (ids,) = load_codec(directory).encode(["12"], add_special_tokens=True)
    assert list(ids) == theirs.encode("12")


# -- settings of the template ------------------------------------------------------------------------------

THINKING = (
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% else %}unset{% endif %}{{ color or '' }}"
)


def test_template_arguments_reach_the_template(model_dir):
    directory = model_dir(template=THINKING)
    messages = CONVERSATIONS[0]
    assert load_codec(directory).render(messages) == "unset"
    assert load_codec(directory, enable_thinking=False).render(messages) == "False"
    codec = load_codec(directory, enable_thinking=True, chat_template_kwargs={"color": "red"})
    assert codec.render(messages) == "Truered"
    assert load_codec(directory, chat_template_kwargs={"enable_thinking": 1}).render(messages) == "1"


def test_template_arguments_that_contradict_are_refused(model_dir):
    directory = model_dir(template=THINKING)
    with pytest.raises(TemplateError, match="enable_thinking is True"):
        load_codec(directory, enable_thinking=True, chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(TemplateError, match="'messages'"):
        load_codec(directory, chat_template_kwargs={"messages": []})


def test_another_template_takes_the_models_place(model_dir, tmp_path):
    directory = model_dir(template="MODEL")
    file = tmp_path / "mine.jinja"
    file.write_text("MINE {{ messages[0]['content'] }}", encoding="utf-8")
    assert load_codec(directory, chat_template=str(file)).render(CONVERSATIONS[0]) == "MINE What is 12+34?"
    chatml = load_codec(directory, chat_template="chatml").render(CONVERSATIONS[1])
    assert chatml == (
        "<|im_start|>system\n Be brief. <|im_end|>\n<|im_start|>user\n  café 你好\n\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    with pytest.raises(TemplateError, match="chatml, chatml-tools or a file"):
        load_codec(directory, chat_template=str(tmp_path / "nowhere.jinja"))
    file.write_text("{% for %}", encoding="utf-8")
    with pytest.raises(TemplateError, match=r"mine\.jinja cannot be used"):
        load_codec(directory, chat_template=str(file))


# -- end tokens --------------------------------------------------------------------------------------------


def test_end_tokens_are_brought_together_from_all_four_places(model_dir, codec):
    end = codec.tokenizer.token_to_id("<|im_end|>")
    start, pad = (codec.tokenizer.token_to_id(t) for t in ("<|im_start|>", "<|endoftext|>"))
    assert codec.stop_token_ids == (end,)
    assert codec.stop_sources == {end: ("template", "generation_config", "config", "tokenizer")}
    changed = load_codec(
        model_dir(
            generation_config={"eos_token_id": [7, start]},
            config={"eos_token_id": 3},
            tokenizer_config={"eos_token": "<|endoftext|>"},
        )
    )
    # The template's own first, as other programs take the first one for the end of a turn.
    assert changed.stop_token_ids == (end, 7, start, 3, pad)
    assert changed.stop_sources[end] == ("template",)
    assert stop_tokens_in_words(changed) == (
        f"<|im_end|> ({end}; template), {codec.tokenizer.id_to_token(7)} (7; generation_config), "
        f"<|im_start|> ({start}; generation_config), {codec.tokenizer.id_to_token(3)} (3; config), "
        f"<|endoftext|> ({pad}; tokenizer)"
    )


@pytest.mark.parametrize(
    ("template", "token"),
    [
        ("{% for m in messages %}{{ m['content'] }} <|endoftext|>\n{% endfor %}", "<|endoftext|>"),
        ("{% for m in messages %}{{ m['content'] | trim }}<|im_end|><|endoftext|>{% endfor %}", "<|im_end|>"),
        ("{% for m in messages %}{{ m['content'] }}\n\n{% endfor %}", None),
        ("{{ messages[0]['content'] }}<|im_end|>", None),
        ("{{ raise_exception('only one turn') }}", None),
    ],
)
def test_the_token_that_a_template_closes_a_turn_with(template, token, model_dir):
    nothing = {"eos_token_id": None}
    made = load_codec(
        model_dir(
            template=template, generation_config=nothing, config=nothing, tokenizer_config={"eos_token": None}
        )
    )
    expected = () if token is None else (made.tokenizer.token_to_id(token),)
    assert made.stop_token_ids == expected
    assert stop_tokens_in_words(made) == (f"{token} ({expected[0]}; template)" if token else "none")


@pytest.mark.parametrize(
    ("template", "mark"),
    [
        ("{% for m in messages %}{{ m['content'] }}<|eot_id|>\n{% endfor %}", "<|eot_id|>"),
        ("{% for m in messages %}{{ m['content'] }}\n</s> {% endfor %}", "</s>"),
        ("{% for m in messages %}{{ m['content'] }}<|im_end|></s>{% endfor %}", ""),
        ("{% for m in messages %}{{ m['content'] }}\n\nUser: <b>{% endfor %}", ""),
        ("{% for m in messages %}{{ m['content'] }} < 3 >{% endfor %}", ""),
        ("{{ messages[0]['content'] }}</s>", ""),
        ("none", ""),
    ],
)
def test_a_mark_that_is_no_token_cannot_be_stopped_at(template, mark, model_dir):
    made = load_codec(model_dir(template=template))
    assert made.unstoppable == mark
    assert ("template" in {who for by in made.stop_sources.values() for who in by}) == (
        "<|im_end|>" in template
    )


def test_chatml_for_a_tokenizer_without_its_tokens(model_dir):
    directory = model_dir()
    assert load_codec(directory, chat_template="chatml").unstoppable == ""
    file = directory / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace("<|im_end|>", "<|other|>"), encoding="utf-8")
    assert load_codec(directory, chat_template="chatml").unstoppable == "<|im_end|>"


def test_chatml_begins_as_the_tokenizer_begins_a_text(model_dir, tmp_path):
    asked = [{"role": "user", "content": "hi"}]
    ends = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    plain, with_token = model_dir(), with_bos(model_dir())
    assert load_codec(plain, chat_template="chatml").render(asked) == ends
    codec = load_codec(with_token, chat_template="chatml")
    prompt = codec.render(asked)
    assert prompt == f"<|endoftext|>{ends}"
    (ids,) = codec.encode([prompt])
    assert ids == codec.prefix_ids + codec.encode([ends])[0] and len(codec.prefix_ids) == 1
    # transformers renders and encodes it the same.
    other = AutoTokenizer.from_pretrained(with_token)
    other.chat_template = codec.template_text
    assert other.apply_chat_template(asked, add_generation_prompt=True, tokenize=False) == prompt
    assert prompt_problem(codec) is None


def test_a_template_without_what_the_tokenizer_begins_a_text_with(model_dir, tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text(CHATML, encoding="utf-8")
    plain, with_token = model_dir(), with_bos(model_dir())
    assert unwritten_prefix(load_codec(plain, chat_template=str(file))) == ""
    assert unwritten_prefix(load_codec(with_token, chat_template=str(file))) == "<|endoftext|>"
    assert unwritten_prefix(load_codec(with_token, chat_template="chatml")) == ""
    file.write_text("{{ raise_exception('no') }}", encoding="utf-8")
    assert unwritten_prefix(load_codec(with_token, chat_template=str(file))) == ""


def test_an_end_token_may_be_spelled_out(model_dir, codec):
    spelled_out = model_dir(
        template="none",
        generation_config={"eos_token_id": None},
        config={"eos_token_id": None},
        tokenizer_config={"eos_token": {"content": "<|endoftext|>", "lstrip": False}},
    )
    assert load_codec(spelled_out).stop_token_ids == (codec.tokenizer.token_to_id("<|endoftext|>"),)


def test_end_tokens_without_a_generation_config(model_dir, codec):
    directory = model_dir()
    (directory / "generation_config.json").unlink()
    assert load_codec(directory).stop_token_ids == codec.stop_token_ids


_TURN = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
_OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_THINKS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
_INSTRUCTIONS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)
_ROLES = "{% for m in messages %}{{ m['role'] | upper }}: {{ m['content'] }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "bos", "problem"),
    [
        (CHATML, None, None),
        (_TURN + _OPEN, "<|endoftext|>", None),
        # The answer follows the question directly, and there is nothing to open.
        (_INSTRUCTIONS, None, None),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", None, None),
        # Every conversation is opened for an answer.
        (_ROLES + "ASSISTANT:", None, None),
        # Thoughts before an answer in a conversation, and a prompt that begins them.
        (_THINKS + _OPEN, None, None),
        (_TURN + _OPEN.replace("assistant\n", "assistant\n<think>\n"), None, None),
        # A template that refuses a bare question says nothing.
        ("{{ raise_exception('a system message first') }}", None, None),
        (None, None, None),
        (_TURN, None, "does not end a prompt with '<|im_start|>assistant'"),
        (_THINKS, None, "does not end a prompt with '<|im_start|>assistant'"),
        (_ROLES, None, "does not end a prompt with 'ASSISTANT:'"),
        ("{{ bos_token }}" + _TURN + _OPEN, "<|endoftext|>", None),
        ("{{ bos_token }}{{ bos_token }}" + _TURN + _OPEN, "<|endoftext|>", "puts <|endoftext|> twice"),
    ],
)
def test_how_a_template_begins_a_prompt(template, bos, problem, codec):
    special = dict(codec.special_tokens) | ({"bos_token": bos} if bos else {})
    made = None if template is None else compiled(template, "the template")
    found = prompt_problem(replace(codec, chat_template=made, special_tokens=special))
    assert (found is None) == (problem is None), found
    assert found is None or problem in found.words
    assert found is None or ("end a prompt" in problem) == bool(found.opening)
