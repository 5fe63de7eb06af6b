"""A server that `vllm serve` started, as a run sees it.

Its weights are replaced by files that both sides see. It says nothing of what it holds: the canary alone
vouches for the weights. Each publish gives it a label with run and version, and completions count where the
label is there after them: a server that was started again, or that another run publishes to, has another.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import save
from tokenizers import Tokenizer

from covey.plan.facts import VllmServeFacts
from covey.rollout.server.bucket import Bucket
from covey.rollout.server.call import Caller
from covey.rollout.server.remote import State
from covey.rollout.server.values import WireError
from covey.rollout.server.vllm_routes import asked_label, label, version_of
from covey.rollout.server.vllm_sampling import Progress, VllmSampling
from covey.rollout.server.wire import NO_VERSION, WHOLE, ServerStatus
from covey.texts import counted, tr
from covey.types import GenerationRequest, Receipt

# Seconds in which a server says how it is, and between two tries to empty its cache of prompts.
_STATUS_S, _AGAIN_S = 30.0, 0.2
# Completions that are asked for side by side: each has a thread and a connection.
_MOST_ROWS = 128


@dataclass(slots=True)
class VllmServe:
    """A server that `vllm serve` started; the run's model has `vocab` tokens, and is called `model` there.

    `tied` are further names of the model's tensors, which a server that unties its head is sent too.
    """

    caller: Caller
    about: VllmServeFacts
    model: str
    vocab: int
    max_len: int
    dtype: str
    tied: Mapping[str, str]
    tokenizer: Tokenizer | None = None
    state: State = State.ASKED
    status: ServerStatus | None = None
    said: str = ""
    strikes: int = 0
    progress: Progress = field(default_factory=Progress)
    group: None = None
    image_sent_at: float = 0.0
    _files: tempfile.TemporaryDirectory[str] | None = None
    _sent: list[str] = field(default_factory=list)
    _running: dict[str, VllmSampling] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """Where it listens."""
        return self.caller.address

    def join(self) -> ServerStatus:
        """Ask which weights it has."""
        found = version_of(self._label(), self.caller.run)
        self.status = ServerStatus(
            name="vllm serve",
            instance="",
            engine="vllm",
            model=self.model,
            model_type="",
            num_parameters=0,
            vocab=self.vocab,
            max_len=self.max_len,
            dtype=self.dtype,
            version=NO_VERSION if found is None else found,
            rows=min(self.about.max_num_seqs, _MOST_ROWS),
            noise_keys=False,
            run="",
            is_receiving=False,
            publish_directory="",
        )
        return self.status

    def _label(self) -> str:
        return asked_label(self.caller, min(self.caller.timeout_s, _STATUS_S))

    def check_label(self, version: int) -> None:
        """WireError where it has other weights than those of this version of this run."""
        expected, found = label(self.caller.run, version), self._label()
        if found != expected:
            raise WireError(
                tr(
                    "its weights are labeled {found!r:.80} instead of {expected!r}: it was started again, or "
                    "another run publishes to it",
                    found=found,
                    expected=expected,
                )
            )

    def leave(self) -> None:
        """Use it no longer."""
        self.abort(None)
        if self._files is not None:
            self._files.cleanup()
            self._files = None

    # -- publishing

    def begin(self, version: int, form: str = WHOLE) -> str:
        """Open a publish: no version is there from here on. ValueError for an adapter alone."""
        if form != WHOLE:
            raise ValueError("covey sends `vllm serve` whole weights, with the adapter added")
        self.leave()
        self._tell_label(NO_VERSION)
        self._sent = []
        self._files = tempfile.TemporaryDirectory(prefix="covey-publish-", dir=self.about.directory)
        return self._files.name

    def give(self, transfer: str, bucket: Bucket) -> None:
        """Write tensors into a file of the publish."""
        given, data = bucket.on_cpu, bucket.data
        own = dict(given)
        if self.about.unties_head:
            own |= {alias: given[name] for alias, name in self.tied.items() if name in given}
        if len(own) > len(given):
            data = save({name: tensor.clone() for name, tensor in own.items()})
        (Path(transfer) / f"{len(self._sent):06d}.safetensors").write_bytes(data)
        self._sent += given

    def end(self, transfer: str, num_tensors: int, version: int) -> Receipt:
        """Have it read the files, and forget what it computed with former weights."""
        if len(self._sent) != num_tensors:
            raise WireError(
                tr(
                    "{sent} were sent, but {written} were written",
                    sent=counted(num_tensors, "tensor"),
                    written=len(self._sent),
                )
            )
        try:
            # It may have been started without weights, by --load-format dummy.
            self._call("update_config", args=[{"load_config": {"load_format": "safetensors"}}])
            self._call("reload_weights", kwargs={"weights_path": transfer})
            self._empty_cache()
            self._tell_label(version)
            self.check_label(version)
        finally:
            if self._files is not None:
                self._files.cleanup()
                self._files = None
        self.join()
        return Receipt(version=version, unread=tuple(self._sent))

    def _call(self, method: str, **arguments: object) -> None:
        self.caller.post("/collective_rpc", {"method": method, **arguments})

    def _empty_cache(self) -> None:
        """The cache is kept while requests run: what was hung up ends within a step of vLLM."""
        until = time.monotonic() + self.caller.timeout_s
        while (body := self.caller.post("/reset_prefix_cache", {})) != {"success": True}:
            if body != {"success": False} or time.monotonic() > until:
                raise WireError(tr("it did not empty its prefix cache: {body!r:.80}", body=body))
            time.sleep(_AGAIN_S)

    def _tell_label(self, version: int) -> None:
        self.caller.post("/update_weight_version", {"new_version": label(self.caller.run, version)})

    # -- sampling

    def sample(self, version: int, requests: Mapping[str, GenerationRequest]) -> VllmSampling:
        """Sample requests, by their ids."""
        assert self.status is not None
        sampling = VllmSampling(
            self.caller,
            self.model,
            requests,
            version=version,
            rows=self.status.rows,
            check=lambda: self.check_label(version),
            progress=self.progress,
            vocab=self.vocab,
            tokenizer=self.tokenizer,
        )
        self._running |= dict.fromkeys(requests, sampling)
        return sampling

    def abort(self, ids: list[str] | None) -> None:
        """End requests, or all of this process: vLLM ends what nobody reads any more."""
        for rid in list(self._running) if ids is None else ids:
            if (sampling := self._running.pop(rid, None)) is not None:
                sampling.end(rid)
