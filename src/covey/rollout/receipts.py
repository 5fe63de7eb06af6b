"""What was sent to an engine, and what the engine says that it holds: both must name the same tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from covey.checksums import checksum
from covey.codes import CODES
from covey.errors import GuardStop
from covey.rollout.canary import Bound, Outcome
from covey.texts import joined, tr
from covey.types import Finding, Fix, Receipt

_NAMED = 3
_AGAIN = Fix(text=tr("restart the engine, then resume with --resume_from_checkpoint latest"))
_SAME_DTYPE = Fix(text=tr("let the engine load the model in the dtype that the run computes in"))
_ONE_RUN = Fix(
    text=tr(
        "start rollout servers for this run alone, name them in --rollout_servers, and resume with "
        "--resume_from_checkpoint latest"
    )
)


@dataclass(slots=True, kw_only=True)
class Sent:
    """The tensors of a version as they were sent: their checksums by name, and their bytes in all."""

    version: int
    fingerprints: dict[str, int] = field(default_factory=dict)
    num_bytes: int = 0

    def add(self, name: str, weight: Tensor) -> None:
        """Take a tensor in."""
        self.fingerprints[name] = checksum(weight)
        self.num_bytes += weight.numel() * weight.element_size()

    @property
    def digest(self) -> str:
        """Sixteen hex digits that stand for all names and checksums."""
        lines = "".join(f"{name} {self.fingerprints[name]}\n" for name in sorted(self.fingerprints))
        return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()


def check_receipt(
    engine: str, receipt: Receipt, sent: Sent, before: Sent | None, tied: Mapping[str, str]
) -> None:
    """Hold the receipt of one engine to what was sent.

    `before` is what was sent the last time, and `tied` further names of the model's tensors. Raises GuardStop
    where the engine serves another version (F150), one that this run has not published (F155), or holds other
    tensors (F151).
    """
    if receipt.version != sent.version:
        _refuse_version(engine, receipt.version, sent.version, before)
    there, expected = receipt.fingerprints, sent.fingerprints
    names: dict[str, tuple[str, ...]] = {name: (name,) for name in expected}
    for alias, name in tied.items():
        if name in expected:
            names[name] = (*names[name], alias)
    found = {*there, *receipt.unread}
    missing = [name for name, own in names.items() if found.isdisjoint(own)]
    known = {own: name for name, every in names.items() for own in every}
    extra = sorted(found - known.keys())
    differing = [n for n in sorted(there.keys() & known.keys()) if there[n] != expected[known[n]]]
    if not (missing or extra or differing):
        return
    parts = [
        tr("{what}: {listed}", what=what, listed=_listed([_with_tie(n, known.get(n, n)) for n in own]))
        for what, own in (
            (tr("missing"), missing),
            (tr("held although not sent"), extra),
            (tr("held with different values"), differing),
        )
        if own
    ]
    old = [n for n in differing if before is not None and there[n] == before.fingerprints.get(known[n])]
    cause, fix = _cause(missing, extra, differing, old, before, names)
    raise _stop(
        "F151",
        engine,
        sent.version,
        tr(
            "{num_expected} tensors were sent; {parts}", num_expected=len(expected), parts=joined("; ", parts)
        ),
        cause,
        fix,
    )


def _cause(
    missing: Sequence[str],
    extra: Sequence[str],
    differing: Sequence[str],
    old: Sequence[str],
    before: Sent | None,
    names: Mapping[str, Sequence[str]],
) -> tuple[str, Fix]:
    if old and before is not None:
        if len(old) < len(differing):
            kept = tr(
                "{num_old} of {num_differing} are still those of version {version}",
                num_old=len(old),
                num_differing=len(differing),
                version=before.version,
            )
        else:
            kept = tr(
                "{num_old} are still those of version {version}", num_old=len(old), version=before.version
            )
        return tr("{kept}: they were not replaced.", kept=kept), _AGAIN
    if differing and len(differing) >= len(names):
        return tr(
            "The engine has the weights in another dtype, or the weights of another model."
        ), _SAME_DTYPE
    if differing:
        return (
            tr(
                "They belong to no version of this run: they were rounded on the way, or another "
                "run publishes to the same engine."
            ),
            _ONE_RUN,
        )
    if missing:
        return tr("They were lost on the way, or the engine's model does not have these tensors."), _AGAIN
    return tr("The engine serves another model."), _AGAIN


def _refuse_version(engine: str, served: int, version: int, before: Sent | None) -> None:
    if before is None or served in (before.version, -1):
        was = _named(served)
        raise _stop(
            "F150",
            engine,
            version,
            tr("it serves {was}", was=was),
            tr("It accepted the weights, but still serves the earlier ones."),
            _AGAIN,
        )
    raise _stop(
        "F155",
        engine,
        version,
        tr(
            "it serves version {served}, which is not the one that this run has just published", served=served
        ),
        tr("Another run publishes to the same engine."),
        _ONE_RUN,
    )


def _named(version: int) -> str:
    return tr("no version") if version < 0 else tr("version {version}", version=version)


def check_sampled_by(engine: str, versions: set[int], version: int) -> None:
    """Raise GuardStop (F154) where the canary was sampled by another version than was just published."""
    others = sorted(versions - {version})
    if others:
        was = joined(", ", [_named(v) for v in others])
        raise _stop(
            "F154",
            engine,
            version,
            tr("it confirmed the weights, but then sampled with {was}", was=was),
            tr("Its process was restarted with its initial weights."),
            Fix(
                text=tr(
                    "see in the engine's log why it ended, then resume with --resume_from_checkpoint latest"
                )
            ),
        )


def check_canary(engine: str, found: Outcome, bound: Bound, version: int) -> None:
    """Raise GuardStop where an engine's logprobs (F152) or tokens (F153) are not the learner's."""
    if not found.gap <= bound.value:
        explained = (
            tr("rounding explains {value:.2g}, learned at the first publish", value=bound.value)
            if bound.is_learned
            else tr("no rounding explains more than {value:g}", value=bound.value)
        )
        raise _stop(
            "F152",
            engine,
            version,
            tr(
                "its log-probabilities of a few test completions differ by up to {gap:.3g} from the "
                "learner's (token {at} of {num_tokens}); {explained}",
                gap=found.gap,
                at=found.at,
                num_tokens=found.num_tokens,
                explained=explained,
            ),
            tr(
                "It has the right tensors but computes with others: its head is tied to the "
                "embedding or was packed earlier, an adapter is not applied, or its prefix cache "
                "is from former weights."
            ),
            _AGAIN,
        )
    if found.wrong_token:
        raise _stop(
            "F153",
            engine,
            version,
            tr("{wrong_token}; its log-probabilities equal the learner's", wrong_token=found.wrong_token),
            tr(
                "It samples with another seed, noise or order of the vocabulary, or filters the tokens "
                "that it samples from."
            ),
            _AGAIN,
        )


def _stop(code: str, engine: str, version: int, seen: str, cause: str, *fixes: Fix) -> GuardStop:
    return GuardStop(
        Finding(
            code=code,
            seen=tr(
                "publish of version {version} to {engine}: {seen}", version=version, engine=engine, seen=seen
            ),
            why=CODES[code].why,
            cause=cause,
            fixes=fixes,
            step=version,
        )
    )


def _with_tie(name: str, sent_as: str) -> str:
    return name if name == sent_as else tr("{name} (tied to {sent_as})", name=name, sent_as=sent_as)


def _listed(names: Sequence[str]) -> str:
    more = tr(" and {num_names} more", num_names=len(names) - _NAMED) if len(names) > _NAMED else ""
    return tr("{names}{more}", names=joined(", ", names[:_NAMED]), more=more)
