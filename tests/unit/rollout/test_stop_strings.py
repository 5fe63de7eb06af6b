"""Where a completion ends at stop strings: what the search finds against decoding everything anew, and that
every engine ends at the same token."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from covey.errors import RunFailed
from covey.kernels.gpu.kernels import GpuKernels
from covey.kernels.gpu.recordings import Recordings
from covey.models.lora import plain_weights
from covey.quickstart import task
from covey.rollout.generate import GenerateEngine
from covey.rollout.native.engine import NativeEngine
from covey.rollout.server.held import HeldEngine
from covey.rollout.server.values import WireError
from covey.rollout.server.wire import completion_body, completion_of
from covey.rollout.stop_strings import StopSearch
from covey.types import Completion, Finish
from support.engines import sampled
from support.servers import engine_on, policy_of_server, running

END = "</answer>"


def by_decoding_all(tokenizer: Tokenizer, strings: Sequence[str], tokens: Sequence[int]) -> int | None:
    """The definition: the fewest tokens whose text contains a stop string."""
    for number in range(1, len(tokens) + 1):
        text = tokenizer.decode(list(tokens[:number]), skip_special_tokens=True)
        if any(string in text for string in strings):
            return number
    return None


def found(tokenizer: Tokenizer, tokens: Sequence[int], *strings: str) -> int | None:
    number = StopSearch(tokenizer, strings).first_end(tokens)
    assert number == by_decoding_all(tokenizer, strings, tokens)
    return number


def of_bytes(*tokens: bytes) -> Tokenizer:
    """A byte-level tokenizer with these tokens, and `<end>` behind them, which is special."""
    letters = {ord(letter): letter for letter in pre_tokenizers.ByteLevel.alphabet() if ord(letter) < 256}
    rest = iter(range(256, 512))
    shown = {byte: letters.get(byte) or chr(next(rest)) for byte in range(256)}
    vocab = {"".join(shown[byte] for byte in token): number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=""))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


def of_words(*tokens: str) -> Tokenizer:
    """A tokenizer of Llama 2's kind: `▁` for a space, tokens for single bytes, the first space left out."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=""))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


# -- the search --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strings", "expected"),
    [
        (("</answer>",), 4),  # in the middle of a token, over three of them
        (("wer>\n",), 4),
        (("\nQ",), 5),
        (("42</",), 2),
        (("Q", "4"), 1),  # the first one that is there, whichever it is
        (("answers",), None),
        (("</answer>\nQ",), 5),
    ],
)
def test_a_stop_string_over_the_borders_of_tokens(strings: tuple[str, ...], expected: int | None) -> None:
    tokenizer = of_bytes(b"42", b"</", b"ans", b"wer>\n", b"Q:")
    assert found(tokenizer, range(5), *strings) == expected


def test_overlapping_beginnings() -> None:
    tokenizer = of_bytes(b"a", b"b")
    assert found(tokenizer, [0, 0, 0, 1, 1], "aab") == 4
    assert found(tokenizer, [0, 1, 0, 1, 0, 0, 1], "abaab") == 7
    assert found(tokenizer, [0, 0, 1], "a") == 1


def test_characters_of_several_tokens() -> None:
    tokenizer = of_bytes(*(bytes([byte]) for byte in "答案：😀".encode()))
    assert found(tokenizer, range(9), "答案：") == 9
    assert found(tokenizer, range(9), "案") == 6
    assert found(tokenizer, range(13), "😀") == 13
    assert found(tokenizer, range(12), "😀") is None


def test_a_token_that_ends_a_stop_string_and_begins_another_character() -> None:
    """The last bytes may never come: it is this token that completes the string."""
    tokenizer = of_bytes(b"x", "答案".encode()[:4], "答案".encode()[4:])
    assert found(tokenizer, [0, 1, 2], "答") == 2
    assert found(tokenizer, [0, 1, 2], "答案") == 3
    assert found(tokenizer, [0, 1, 0], "x答") == 2


def test_special_tokens_are_no_text() -> None:
    tokenizer = of_bytes(b"a", b"b")
    end = tokenizer.token_to_id("<end>")
    assert found(tokenizer, [0, end, 1], "ab") == 3
    assert found(tokenizer, [0, end, 1], "<end>") is None
    assert found(tokenizer, [0, *[end] * 50, 1, 0], "ab") == 52


def test_spaces_of_words() -> None:
    tokenizer = of_words("▁The", "▁answer", ":", "<0xE7>", "<0xAD>", "<0x94>", "▁")
    assert found(tokenizer, [0, 1, 2], " answer:") == 3
    assert found(tokenizer, [0, 1, 2], "The a") == 2
    assert found(tokenizer, [0, 3, 4, 5, 3, 4, 5], "答答") == 7
    assert found(tokenizer, [0, 6, 6, 1], "   answer") == 4
    # Bytes that are no text by themselves, and for long.
    assert found(tokenizer, [0, *[4] * 40, 1], " answer") == 42


@pytest.mark.parametrize("seed", range(3))
def test_any_tokens(seed: int, quickstart_codec) -> None:
    """What is found token by token is what is found in all of the text, whatever the model samples."""
    tokenizer, draw = quickstart_codec.tokenizer, random.Random(seed)
    common = quickstart_codec.encode(["答案 </answer> ok 😀\n\n"])[0]
    ends = []
    for _ in range(150):
        tokens = [draw.choice(common) if draw.random() < 0.8 else draw.randrange(320) for _ in range(40)]
        at = draw.randrange(40)
        tokens[at:at] = draw.choice([common, common[:6], common[:5], ()])
        ends.append(found(tokenizer, tokens, "答案", "answer> o", "\n\n\n", "😀"))
    assert None in ends and len(set(ends)) > 20


# -- the engines -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asked(quickstart_codec, requests_of):
    """Eight completions of eight prompts each, which end at no token."""
    rows = task.training_rows()[:8]
    prompts = quickstart_codec.encode([quickstart_codec.render(r["messages"]) for r in rows])
    return requests_of(prompts, 8, max_new_tokens=20)


def with_strings(requests, *strings: str):
    return [replace(r, sampling=replace(r.sampling, stop_strings=strings)) for r in requests]


def contents(completions):
    return [(c.token_ids, c.finish) for c in completions]


def cut(completions, strings: Sequence[str], tokenizer: Tokenizer):
    """What engines have to give, by the definition, of completions that went on."""
    ends = [by_decoding_all(tokenizer, strings, c.token_ids) for c in completions]
    return [
        (c.token_ids[:end], Finish.LENGTH if end is None else Finish.STOP)
        for c, end in zip(completions, ends, strict=True)
    ]


STRINGS = [(END,), ("4",), ("ans", "3+"), ("wer>\n", "0</a", "</think><answer>1")]


@pytest.mark.parametrize("strings", STRINGS)
@pytest.mark.parametrize("kind", ["compiled", "torch", "strides", "recorded", "few rows", "generate"])
def test_engines_end_at_the_same_token(
    kind: str, strings, asked, quickstart_policy, quickstart_codec, run_engine
) -> None:
    policy, tokenizer = quickstart_policy, quickstart_codec.tokenizer
    engine = {
        "compiled": lambda: NativeEngine(policy, tokenizer=tokenizer),
        "torch": lambda: NativeEngine(policy, tokenizer=tokenizer, stride=1),
        "strides": lambda: NativeEngine(policy, tokenizer=tokenizer, stride=7),
        "recorded": lambda: NativeEngine(
            policy, tokenizer=tokenizer, stride=5, kernels=GpuKernels(Recordings(lambda compute: compute))
        ),
        "few rows": lambda: NativeEngine(policy, tokenizer=tokenizer, max_rows=5),
        "generate": lambda: GenerateEngine(policy, tokenizer=tokenizer),
    }[kind]()
    expected = cut(run_engine(NativeEngine(policy), asked), strings, tokenizer)
    done = run_engine(engine, with_strings(asked, *strings))
    assert contents(done) == expected
    assert all(len(c.logprobs) == len(c.token_ids) == len(c.versions) for c in done)
    assert Counter(c.finish for c in done)[Finish.STOP] > 8


def test_at_the_last_token_a_stop_string_counts(
    asked, quickstart_policy, quickstart_codec, run_engine
) -> None:
    tokenizer = quickstart_codec.tokenizer
    (whole,) = run_engine(NativeEngine(quickstart_policy), asked[:1])
    end = by_decoding_all(tokenizer, [END], whole.token_ids)
    assert end is not None
    for engine in (
        NativeEngine(quickstart_policy, tokenizer=tokenizer),
        GenerateEngine(quickstart_policy, tokenizer=tokenizer),
    ):
        for limit, finish in ((end, Finish.STOP), (end - 1, Finish.LENGTH)):
            (request,) = with_strings(asked[:1], END)
            sampling = replace(request.sampling, max_new_tokens=limit)
            (done,) = run_engine(engine, [replace(request, sampling=sampling)])
            assert (len(done.token_ids), done.finish) == (limit, finish)


def test_requests_with_and_without_stop_strings_run_together(
    asked, quickstart_policy, quickstart_codec, run_engine
) -> None:
    tokenizer = quickstart_codec.tokenizer
    free = run_engine(NativeEngine(quickstart_policy), asked)
    mixed = [with_strings([r], END)[0] if i % 2 else r for i, r in enumerate(asked)]
    expected = [
        one if i % 2 else (c.token_ids, c.finish)
        for i, (one, c) in enumerate(zip(cut(free, [END], tokenizer), free, strict=True))
    ]
    for engine in (NativeEngine, GenerateEngine):
        assert contents(run_engine(engine(quickstart_policy, tokenizer=tokenizer), mixed)) == expected


def test_an_engine_without_a_tokenizer_refuses_stop_strings(asked, quickstart_policy) -> None:
    for kind in (NativeEngine, GenerateEngine):
        with pytest.raises(ValueError, match="tokenizer"):
            kind(quickstart_policy).submit(with_strings(asked, END)[0])


def test_a_completion_that_ended_at_a_stop_string_is_gone_on_from(
    asked, quickstart_policy, quickstart_codec, run_engine
) -> None:
    """Its keys and values are those up to its last token, whatever a stride computed behind it."""
    tokenizer = quickstart_codec.tokenizer
    first = replace(with_strings(asked, END)[0], may_go_on=True)
    for stride in (1, 7):
        engine = NativeEngine(quickstart_policy, tokenizer=tokenizer, stride=stride)
        (done,) = run_engine(engine, [first])
        longer = replace(
            first,
            prompt_token_ids=(*first.prompt_token_ids, *done.token_ids, 17, 10, 18),
            turn=replace(first.turn, turn=1),
        )
        (fresh,) = run_engine(NativeEngine(quickstart_policy, tokenizer=tokenizer), [longer])
        (kept,) = run_engine(engine, [replace(longer, extends=first.turn)])
        assert contents([kept]) == contents([fresh])
        assert kept.logprobs == pytest.approx(fresh.logprobs, abs=1e-4)


# -- servers -----------------------------------------------------------------------------------------------


def test_a_server_ends_where_the_engine_of_the_process_does(
    asked, quickstart_policy, quickstart_codec, run_engine
) -> None:
    policy, tokenizer = policy_of_server(), quickstart_codec.tokenizer
    requests = with_strings(asked, "0</a", END)
    expected = contents(run_engine(NativeEngine(quickstart_policy, tokenizer=tokenizer), requests))
    # One that has another tokenizer ends later, and the run cuts what comes.
    for own in (tokenizer, of_bytes(b"a")):
        held = HeldEngine(policy, max_rows=64, tokenizer=own)
        with running(policy, engine=held, has_tokenizer=True) as server:
            engine = engine_on([server.address], tokenizer=tokenizer)
            engine.publish(plain_weights(policy), 0)
            found = sampled(engine, requests)
            assert contents(found) == expected
            assert {v for c in found for v in c.versions} == {0}
            engine.close()


def test_a_server_without_a_tokenizer_says_so(asked, quickstart_codec) -> None:
    policy = policy_of_server()
    with running(policy) as server:
        engine = engine_on([server.address], tokenizer=quickstart_codec.tokenizer)
        engine.publish(plain_weights(policy), 0)
        with pytest.raises(RunFailed, match=r"tokenizer\.json"):
            sampled(engine, with_strings(asked, END))
        engine.close()
        assert server.failed == []


def test_the_run_s_own_tokenizer_says_where_a_completion_ends(asked, quickstart_codec) -> None:
    """A server whose tokenizer is another one finds a stop string later, not at all, or where none is."""
    request, tokenizer = with_strings(asked, END)[0], quickstart_codec.tokenizer
    tokens = quickstart_codec.encode([f"12{END}34"])[0]
    end = by_decoding_all(tokenizer, [END], tokens)

    def taken(tokens: Sequence[int], finish: Finish) -> Completion:
        sent = Completion(
            request_id=0,
            token_ids=tokens,
            logprobs=[-0.5] * len(tokens),
            versions=((2, 1), (3, len(tokens) - 1)),
            finish=finish,
            seconds=1.0,
        )
        body = {**completion_body("a", sent), "versions": [list(pair) for pair in sent.versions]}
        return completion_of(body, 0, request, vocab=320, newest=3, tokenizer=tokenizer)

    for finish in (Finish.STOP, Finish.LENGTH):
        found = taken(tokens, finish)
        assert tuple(found.token_ids) == tokens[:end] and found.finish is Finish.STOP
        assert len(found.logprobs) == end and found.versions == ((2, 1), (3, end - 1))
    assert taken(tokens[: end - 1], Finish.LENGTH).finish is Finish.LENGTH
    with pytest.raises(WireError, match="tokenizer"):
        taken(tokens[: end - 1], Finish.STOP)
