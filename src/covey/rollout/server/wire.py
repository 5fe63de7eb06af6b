"""What a client and a rollout server send each other: JSON and safetensors, bounded in size.

Everything that arrives is checked here, since the other side may be broken, another program, or an attacker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice
from os.path import isfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from covey.rollout.server.media_wire import media_body, media_of
from covey.rollout.server.sampling_wire import kept_body, kept_of, sampling_of
from covey.rollout.server.values import WireError, fields_of, is_number, tokens_of
from covey.rollout.stop_strings import num_until_stop
from covey.texts import counted, tr
from covey.types import Completion, Finish, GenerationRequest, TurnId
from covey.types.arrays import Versions, each, floats, ints, runs

PROTOCOL = 9
BUCKET_BYTES = 64 << 20
"""Tensors are sent together up to this size; a larger one is sent alone."""
HEADER_BYTES = 1 << 20
"""What the header of safetensors may add to the tensors of a bucket."""
JSON_BYTES = 64 << 20
"""The longest JSON body or answer."""
LINE_BYTES = 32 << 20
"""The longest line of a stream."""
REQUESTS = 4096
"""The most requests of one call."""
MARKER = "covey-server-"
"""A file of this beginning, with the id of a server behind it, says that a directory is that server's."""
DTYPES = {
    **{
        "float64": 8,
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "int64": 8,
        "int32": 4,
        "int16": 2,
        "int8": 1,
    },
    **{"uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1},
}
"""The dtypes of tensors that go through a process group, by torch's names, and the bytes of an element."""
RUN_HEADER = "Covey-Run"
"""The header with the id of the run that a call belongs to."""

_TENSORS, _NAME, _AXES = 1 << 16, 1024, 16

NO_VERSION = -1
"""The version of a server before its first publish, and while or after one that did not end."""

WHOLE, ADAPTER = "whole", "adapter"
"""What a publish sends: all weights, with or without an adapter's matrices behind them; or the matrices of an
adapter alone, for the base that the server holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """What a server says of itself.

    `instance` is new each time the process starts. `max_len` bounds prompt and completion together (0: no
    bound), `rows` is how many completions it decodes side by side. `run` names the run that uses the server
    ("": none); `is_receiving` says that a publish is going on. `adapter_rank` is the highest rank of an
    adapter that it applies itself (0: none), `base` the digest of the weights beneath one ("": none).
    `group_device` is where a process group brings tensors: "cpu", or GPUs with their UUIDs, one for each
    worker of the engine ("": it takes none). `swaps`: it takes weights while requests run. `has_tokenizer`:
    it finds stop strings. `bans` are the tokens that its model bans ("3 7"); "any": those of each request.
    `images` says how its model's image processor prepares images ("": it takes none). `scheduler` has, as
    JSON, the options of a run whose trajectories its scheduler makes ("": it has none).
    """

    name: str
    instance: str
    engine: str
    model: str
    model_type: str
    num_parameters: int
    vocab: int
    max_len: int
    dtype: str
    version: int
    rows: int
    noise_keys: bool
    run: str
    is_receiving: bool
    publish_directory: str
    adapter_rank: int = 0
    base: str = ""
    group_device: str = ""
    swaps: bool = False
    has_tokenizer: bool = False
    bans: str = ""
    images: str = ""
    scheduler: str = ""
    protocol: int = PROTOCOL

    def body(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def directory_here(self) -> Path | None:
        """The directory through which the server takes weights, where this process sees it too."""
        directory = Path(self.publish_directory)
        is_here = self.publish_directory and isfile(directory / f"{MARKER}{self.instance}")
        return directory if is_here else None

    @classmethod
    def of(cls, body: Any) -> ServerStatus:
        """From JSON; WireError where it is another thing. Names that a later server adds are left out."""
        if not isinstance(body, Mapping) or body.get("protocol") != PROTOCOL:
            raise WireError(tr("it does not speak covey's protocol {version}", version=PROTOCOL))
        kinds = {"str": str, "int": int, "bool": bool}
        values: dict[str, Any] = {}
        for field in fields(cls):
            value = body.get(field.name)
            if type(value) is not kinds[str(field.type)]:
                shown = f"{value!r:.80}"
                raise WireError(tr("its status has the invalid {name} {value}", name=field.name, value=shown))
            values[field.name] = value
        return cls(**values)


def request_body(request: GenerationRequest) -> dict[str, Any]:
    """A request as JSON."""
    return {
        "id": request.turn.text,
        "prompt_token_ids": list(request.prompt_token_ids),
        "sampling": asdict(request.sampling),
        "media": media_body(request.media),
        "turn": asdict(request.turn),
        "extends": None if request.extends is None else asdict(request.extends),
        "may_go_on": request.may_go_on,
    }


def requests_of(body: Any, about: ServerStatus) -> dict[str, GenerationRequest]:
    """The requests of a call by their ids, checked against what the server can sample; the files of their
    images are not with them."""
    if not isinstance(body, list) or not 1 <= len(body) <= REQUESTS:
        raise WireError(f"requests is a list of 1 to {REQUESTS}")
    found: dict[str, GenerationRequest] = {}
    for one in body:
        rid, request = _request(one, about)
        if rid in found:
            raise WireError(f"the id {rid} is given twice")
        found[rid] = request
    return found


def _request(body: Any, about: ServerStatus) -> tuple[str, GenerationRequest]:
    names = ("id", "prompt_token_ids", "sampling", "media", "turn", "extends", "may_go_on")
    given = fields_of(body, names)
    prompt = tokens_of(given["prompt_token_ids"], about.vocab)
    if not prompt:
        raise WireError("a prompt has at least one token")
    if not isinstance(given["id"], str) or not 1 <= len(given["id"]) <= 256:
        raise WireError("an id is text of 1 to 256 characters")
    sampling = sampling_of(
        given["sampling"], about.vocab, about.engine, has_tokenizer=about.has_tokenizer, bans=about.bans
    )
    longest = sampling.max_new_tokens
    if about.max_len and len(prompt) + longest > about.max_len:
        raise WireError(
            f"a prompt of {len(prompt)} tokens and {longest} new ones are more than the {about.max_len} "
            "that this server's model has positions for"
        )
    if type(given["may_go_on"]) is not bool:
        raise WireError("may_go_on is true or false")
    media = media_of(given["media"])
    if media and not about.images:
        raise WireError("this server takes no images")
    request = GenerationRequest(
        prompt_token_ids=prompt,
        sampling=sampling,
        media=media,
        turn=_turn(given["turn"]),
        extends=None if given["extends"] is None else _turn(given["extends"]),
        may_go_on=given["may_go_on"],
    )
    return given["id"], request


def _turn(body: Any) -> TurnId:
    """The id of a turn."""
    given = fields_of(body, [field.name for field in fields(TurnId)])
    split = given.pop("split")
    if not isinstance(split, str) or any(type(number) is not int for number in given.values()):
        raise WireError("the id of a turn is a split and whole numbers")
    return TurnId(split=split, **given)


def completion_body(rid: str, completion: Completion) -> dict[str, Any]:
    """A completion as JSON."""
    return {
        "id": rid,
        "token_ids": completion.token_ids.tolist(),
        "logprobs": completion.logprobs.tolist(),
        "versions": completion.versions,
        "finish": completion.finish.value,
        "seconds": completion.seconds,
        "kept": kept_body(completion.kept),
    }


def completion_of(
    body: Mapping[str, Any],
    number: int,
    request: GenerationRequest,
    *,
    vocab: int,
    newest: int,
    tokenizer: Tokenizer | None = None,
) -> Completion:
    """The completion of a request with the id `number`, of versions that rise up to `newest` at most, up to
    the first stop string by this process's tokenizer; WireError where it cannot be one."""
    given = fields_of(body, ("id", "token_ids", "logprobs", "versions", "finish", "seconds", "kept"))
    tokens = tokens_of(given["token_ids"], vocab)
    logprobs, versions = given["logprobs"], _versions(given["versions"])
    if not isinstance(logprobs, list) or not all(is_number(one) and one <= 1e-3 for one in logprobs):
        raise WireError(tr("it sent logprobs that are not finite numbers of at most 0"))
    if not len(tokens) == len(logprobs) == sum(count for _, count in versions):
        raise WireError(tr("it sent a completion with fewer or more logprobs or versions than tokens"))
    order = [version for version, _ in versions]
    if order != sorted(set(order)) or any(not 0 <= version <= newest for version in order):
        raise WireError(
            tr(
                "it sent tokens of versions {versions:.80}, which have to rise up to {newest} at most",
                versions=str(order),
                newest=newest,
            )
        )
    if len(tokens) > request.sampling.max_new_tokens:
        raise WireError(
            tr(
                "it sent a completion of {tokens}, more than were asked for",
                tokens=counted(len(tokens), "token"),
            )
        )
    if given["finish"] not in (Finish.STOP, Finish.LENGTH) or not tokens:
        raise WireError(
            tr(
                "it sent a completion of {tokens} with the finish reason {finish!r:.40}",
                tokens=counted(len(tokens), "token"),
                finish=given["finish"],
            )
        )
    if not is_number(given["seconds"]):
        raise WireError(tr("it sent seconds that are not a number"))
    kept = kept_of(given["kept"], tokens, request.sampling, vocab)
    length, finish = _end_of(tokens, Finish(given["finish"]), request, tokenizer)
    return Completion(
        request_id=number,
        token_ids=ints(tokens[:length]),
        logprobs=floats(logprobs[:length]),
        versions=runs(islice(each(versions), length)),
        finish=finish,
        seconds=float(given["seconds"]),
        kept=None if kept is None else kept.part(0, length),
    )


def _end_of(
    tokens: Sequence[int], finish: Finish, request: GenerationRequest, tokenizer: Tokenizer | None
) -> tuple[int, Finish]:
    """How long a completion is and why it ended: the server's tokenizer may be another one, which finds stop
    strings later or not at all. WireError where it found one that is not there."""
    length, sampling = num_until_stop(request, tokenizer, tokens), request.sampling
    if length is not None:
        return length, Finish.STOP
    if sampling.stop_strings and finish is Finish.STOP and tokens[-1] not in sampling.stop_token_ids:
        raise WireError(tr("it ended a completion where no stop string is: its tokenizer is another one"))
    return len(tokens), finish


def _versions(body: Any) -> Versions:
    """Runs of versions."""
    pairs: list[Any] = body if isinstance(body, list) else [None]
    if any(
        not isinstance(pair, list)
        or len(pair) != 2
        or not all(type(one) is int for one in pair)
        or pair[1] < 1
        for pair in pairs
    ):
        raise WireError(tr("it sent versions that are not pairs of a version and a number of tokens"))
    return tuple((version, count) for version, count in pairs)


def names_of(body: Any) -> tuple[str, ...]:
    """A list of names; WireError where it is another thing."""
    if not isinstance(body, list) or not all(isinstance(name, str) for name in body):
        raise WireError(tr("its unread tensors are not a list of names"))
    return tuple(body)


def fingerprints_of(body: Any) -> dict[str, int]:
    """Checksums by the names of tensors."""
    if not isinstance(body, Mapping) or any(type(value) is not int for value in body.values()):
        raise WireError(tr("its checksums are not whole numbers"))
    return dict(body)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor that is to come through a process group."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def specs_of(body: Any, most_bytes: int) -> list[TensorSpec]:
    """Tensors of a call, together of `most_bytes` at most; WireError where they are not."""
    if not isinstance(body, list) or not 1 <= len(body) <= _TENSORS:
        raise WireError(f"tensors is a list of 1 to {_TENSORS}")
    found, left = [], most_bytes
    for one in body:
        given = fields_of(one, ("name", "dtype", "shape"))
        name, dtype, shape = given["name"], given["dtype"], given["shape"]
        if not isinstance(name, str) or not 1 <= len(name) <= _NAME:
            raise WireError(f"a name is text of 1 to {_NAME} characters")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise WireError(f"{name} has the dtype {dtype!r:.40}")
        if not isinstance(shape, list) or len(shape) > _AXES or not all(_is_size(one) for one in shape):
            raise WireError(f"{name} has the shape {shape!r:.80}")
        left -= math.prod(shape) * DTYPES[dtype]
        if left < 0:
            raise WireError(f"tensors of more than {most_bytes} bytes")
        found.append(TensorSpec(name=name, dtype=dtype, shape=tuple(shape)))
    if len({spec.name for spec in found}) < len(found):
        raise WireError("a name is given twice")
    return found


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 40
