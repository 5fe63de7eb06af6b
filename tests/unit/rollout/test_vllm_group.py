"""Ranks that are one vLLM: what they tell each other, on threads and with a vLLM that counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.activity import Stopped
from covey.data.images import PlacedImage, RowImage
from covey.data.text import load_codec
from covey.errors import GuardStop, OtherRankFailed
from covey.media.errors import MediaError
from covey.media.source import ImageSource
from covey.models.vision.pixels import PixelReader
from covey.rollout.vllm.group import GroupEngine
from covey.types import Completion, Finish, GenerationRequest, Medium, SamplingParams, TurnId
from support.engines import plain
from support.threads import on_ranks
from support.vision import medium, picture, save_model


def request_of(prompt: int, new: int = 3) -> GenerationRequest:
    return GenerationRequest(
        prompt_token_ids=(prompt, 7),
        sampling=SamplingParams(
            temperature=0.7, max_new_tokens=new, stop_token_ids=(1, 2), stop_strings=("</a>", "\n")
        ),
        turn=TurnId(seed=1, split="train", rollout=0, attempt=0, prompt_id=prompt, sibling=0),
    )


class Counts:
    """In the place of `VllmEngine`: a request ends after as many steps as it asks for new tokens. `seen` has
    all that it was given, in order, `patches` those of images."""

    capabilities = None

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.patches: list[Any] = []
        self.read: Callable[[Medium], Any] = lambda one: one.key
        self.left: dict[int, int] = {}
        self.requests: dict[int, GenerationRequest] = {}
        self.aborted: list[Completion] = []
        self.num_computed = self.digest = 0
        self.after_step: Callable[[], object] = lambda: None

    @property
    def next_id(self) -> int:
        return len(self.requests)

    def submit(self, request: GenerationRequest) -> int:
        number = self.next_id
        if request.sampling.max_new_tokens > 100:
            raise ValueError("cannot be sampled")
        self.patches += [self.read(one) for one in request.media]
        self.seen.append(request)
        self.requests[number], self.left[number] = request, request.sampling.max_new_tokens
        return number

    def abort(self, ids: Sequence[int]) -> None:
        self.seen.append(("abort", list(ids)))
        ids = [number for number in ids if number in self.left]
        self.aborted += [self._completion(number, Finish.ABORT) for number in ids]
        self.left = {number: left for number, left in self.left.items() if number not in ids}

    @property
    def is_busy(self) -> bool:
        return bool(self.left or self.aborted)

    def step(self) -> list[Completion]:
        if self.aborted:
            ended, self.aborted = self.aborted, []
            return ended
        self.seen.append("step")
        self.num_computed += len(self.left)
        ended = [number for number, left in self.left.items() if left == 1]
        self.left = {number: left - 1 for number, left in self.left.items() if left > 1}
        if ended:
            self.after_step()
        return [self._completion(number, Finish.LENGTH) for number in ended]

    def _completion(self, number: int, finish: Finish) -> Completion:
        tokens = (self.requests[number].prompt_token_ids[0],)
        return Completion(
            request_id=number,
            token_ids=tokens,
            logprobs=(0.0,),
            versions=((0, 1),),
            finish=finish,
            seconds=0.0,
        )


def engines(work: Callable[[GroupEngine, Counts, Any], Any]) -> list[Any]:
    """What `work` returns or raises on each of two ranks."""

    def on_rank(comm: Any) -> Any:
        comm.first_rank = 4
        own = Counts()
        return work(GroupEngine(own, comm), own, comm)

    return on_ranks(2, on_rank)


def raised(found: Sequence[Any]) -> None:
    for one in found:
        if isinstance(one, BaseException):
            raise one


def test_all_ranks_give_vllm_what_the_first_one_asks_for() -> None:
    """In its order, what it asks for meanwhile too; and only the first one is given completions."""

    def work(engine: GroupEngine, own: Counts, comm: Any) -> Any:
        asked = {} if comm.rank else {engine.submit(request_of(10)): 10}
        found = {}
        for completion in engine.results():
            found[completion.request_id] = completion.token_ids[0]
            if len(asked) == 1:
                asked |= {engine.submit(request_of(n, n)): n for n in (20, 5)}
        return asked == found, len(found), own.seen

    found = engines(work)
    raised(found)
    assert [one[:2] for one in found] == [(True, 3), (True, 0)]
    assert found[0][2] == found[1][2]
    assert request_of(20, 20) in found[1][2], "a request arrives as it was asked"


def test_all_ranks_end_what_the_first_one_ends() -> None:
    def work(engine: GroupEngine, own: Counts, comm: Any) -> Any:
        numbers = [] if comm.rank else [engine.submit(request_of(n, 9)) for n in range(3)]
        if comm.rank == 0:
            engine.abort([numbers[1], 77])
        found = {c.request_id: (c.token_ids[0], c.finish) for c in engine.results()}
        assert sorted(found) == numbers
        return [found[number] for number in numbers], own.seen

    found = engines(work)
    raised(found)
    kept = Finish.LENGTH
    assert found[0][0] == [(0, kept), (1, Finish.ABORT), (2, kept)]
    assert found[1] == ([], found[0][1])


def test_another_rank_asks_for_nothing() -> None:
    def work(engine: GroupEngine, own: Counts, comm: Any) -> Any:
        if comm.rank:
            with pytest.raises(AssertionError, match="first rank"):
                engine.submit(request_of(1))
        return list(engine.results()), own.seen

    found = engines(work)
    raised(found)
    assert [completions for completions, _ in found] == [[], []]


@pytest.mark.parametrize("signalled", [0, 1])
def test_a_signal_to_one_rank_ends_all_at_the_same_step(signalled: int) -> None:
    def work(engine: GroupEngine, own: Counts, comm: Any) -> Any:
        for n in () if comm.rank else (2, 50):
            engine.submit(request_of(n, n))
        own.after_step = lambda: setattr(comm.activity, "is_asked_to_stop", comm.rank == signalled)
        with pytest.raises(Stopped), comm.activity.stoppable_between_steps():
            for _ in engine.results():
                # What is asked for while the signal arrives is not sampled either.
                engine.submit(request_of(3, 60))
        steps = own.seen.count("step")
        # What may not be stopped goes on, and nothing is left of the requests before.
        if comm.rank == 0:
            engine.submit(request_of(9))
        return steps, [plain(completion).token_ids for completion in engine.results()]

    found = engines(work)
    raised(found)
    assert found == [(2, [(9,)]), (2, [])]


def test_what_cannot_be_sampled_is_refused_on_all_ranks() -> None:
    """So that none of them waits for one that has failed."""

    def work(engine: GroupEngine, own: Counts, comm: Any) -> Any:
        if comm.rank == 0:
            engine.submit(replace(request_of(1), sampling=request_of(1, 101).sampling))
        return list(engine.results())

    assert [str(error) for error in engines(work)] == ["cannot be sampled"] * 2


def seen_in(model: Path, place: Any) -> Medium:
    """An image of a prompt of the model."""
    codec = load_codec(model)
    assert codec.vision is not None
    return codec.vision.medium(place)


def test_every_rank_reads_the_images_itself(tmp_path: Path) -> None:
    """From their files; those in a row of the data, whose table is here alone, are sent."""
    model = save_model("qwen2_5_vl", tmp_path / "model")
    file = tmp_path / "cat.png"
    file.write_bytes(picture((200, 10, 10)))
    table = [{"messages": [{"role": "user", "content": "<image>?"}], "images": [picture((9, 200, 9))]}]
    media = [
        seen_in(model, PlacedImage(ImageSource(path=str(file)))),
        seen_in(model, RowImage(table, 0, 0, ("",))),
    ]

    def work(engine: GroupEngine, own: Counts, comm: Any) -> Any:
        own.read = lambda one: PixelReader(model)([one]).patches_PC.tolist()
        if comm.rank == 0:
            for n, own_media in enumerate(([media[0]], media, media)):
                engine.submit(replace(request_of(n), media=tuple(own_media)))
        told: list[str] = []
        gather = comm.gather_json
        comm.gather_json = lambda value: gather((told.append(str(value)), value)[1])
        assert len(list(engine.results())) == 3 * (comm.rank == 0)
        return [one.media for one in own.seen if isinstance(one, GenerationRequest)], own.patches, told[0]

    found = engines(work)
    raised(found)
    expected = [PixelReader(model)([one]).patches_PC.tolist() for one in media]
    for sent, patches, _ in found:
        assert sent == [(media[0],), tuple(media), tuple(media)]
        assert patches == [expected[n] for n in (0, 0, 1, 0, 1)]
    assert found[0][2].count("'data'") == found[0][2].count("'path'") == 1, "each is sent once"


@pytest.mark.parametrize("blind", [0, 1])
def test_an_image_that_one_rank_cannot_read_fails_on_all(blind: int) -> None:
    def work(engine: GroupEngine, own: Counts, comm: Any) -> Any:
        def read(one: Medium) -> None:
            if comm.rank == blind:
                raise MediaError("cat.png is gone")

        own.read = read
        if comm.rank == 0:
            engine.submit(replace(request_of(1), media=(medium("cat", 1, 1),)))
        return list(engine.results())

    found = engines(work)
    assert isinstance(found[blind], MediaError) and isinstance(found[1 - blind], OtherRankFailed)
    assert all("cat.png is gone" in str(error) for error in found)


@pytest.mark.parametrize("name", ["digest", "num_computed"])
def test_other_tokens_on_one_rank_are_a_stop_of_the_guard(name: str) -> None:
    def work(engine: GroupEngine, own: Counts, comm: Any) -> Any:
        if comm.rank == 0:
            engine.submit(request_of(1))
        own.after_step = lambda: setattr(own, name, 5 + comm.rank)
        return list(engine.results())

    for error in engines(work):
        assert isinstance(error, GuardStop) and error.finding.code == "F302"
        assert "rank 4" in error.finding.seen and "rank 5" in error.finding.seen
