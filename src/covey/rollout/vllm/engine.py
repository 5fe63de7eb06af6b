"""The engine on vLLM: the protocol of `covey.rollout.engine` over one `vllm.LLM`."""

from __future__ import annotations

import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from covey.comm import Comm, LocalComm, raise_on_all_ranks
from covey.models.adapter_shapes import is_of_adapter
from covey.models.vision.tower import ReadPixels
from covey.plan.check_filters import MOST_LISTED, vllm_lists
from covey.rollout.engine import NO_MEMBERS, Capabilities, NamedWeights, nothing
from covey.rollout.receipts import Sent
from covey.rollout.stop_strings import check_stop_strings, search_for
from covey.rollout.vllm import library
from covey.rollout.vllm.files import rank_of, write_adapter
from covey.rollout.vllm.images import ImagePrompts, check_prompt
from covey.rollout.vllm.names import Parts, whole, whole_adapter
from covey.rollout.vllm.running import Running, finish_of
from covey.rollout.vllm.settings import VllmSettings, in_words
from covey.rollout.vllm.workers import Workers
from covey.texts import tr
from covey.types import Completion, Finding, Finish, GenerationRequest, Receipt

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

_WEIGHTS, _CACHE = "weights", "kv_cache"


class VllmEngine:
    """Samples with vLLM from a copy of the weights; all of it is called from one thread.

    `llm` is a `vllm.LLM` that was started with `settings`. Until the first publish nothing is sampled, unless
    it has read the model's weights, which are version -1. The ranks of `comm` are one vLLM together: they
    publish together, each taking every tensor whole and keeping its part. `tokenizer` finds stop strings.
    `read` gives the pixels of images; of those that are one vLLM each rank reads the same.
    """

    name = "vllm"
    given_up = ""
    members = NO_MEMBERS

    def __init__(
        self,
        settings: VllmSettings,
        llm: Any = None,
        comm: Comm | None = None,
        tokenizer: Tokenizer | None = None,
        read: ReadPixels | None = None,
    ) -> None:
        self._comm, self._tokenizer = comm or LocalComm(), tokenizer
        self._merges = bool(llm is None and settings.lora_rank and not library.applies_adapters(settings))
        self._settings = settings = replace(settings, lora_rank=0) if self._merges else settings
        self._llm = library.start(settings) if llm is None else llm
        self._images = ImagePrompts(self._llm, read, settings.dtype)
        self.capabilities = Capabilities(
            logprobs=True,
            noise_keys=False,
            holds_weights=True,
            forgets=settings.sleeps_deeply,
            adapter_rank=settings.highest_rank,
            num_ranks=self._comm.world,
            context=settings.max_model_len,
            # One in another process samples on meanwhile, and an adapter stays until its requests end.
            swaps=not settings.own_processes and not settings.lora_rank,
        )
        # Those of them that are processes of their own.
        self.workers = Workers(self._llm.collective_rpc) if settings.own_processes else None
        self._version = -1
        self._has_weights = settings.has_weights
        self._asleep: set[str] = set()
        # The number of the next request.
        self.next_id = 0
        self._num_publishes = 0
        self._running: dict[int, Running] = {}
        self._aborted: list[Completion] = []
        # The weights that were sent last, without an adapter, and how many numbers each tensor has.
        self._base: Sent | None = None
        self._numel: dict[str, int] = {}
        self._adapter: Any = None
        self._adapter_files: tempfile.TemporaryDirectory[str] | None = None
        # What a server takes between two steps.
        self.on_turn: Callable[[], None] = nothing
        # Of all tokens that several ranks sampled together: where it differs, they sampled other ones.
        self.digest = 0
        # What a server says of its progress; steps of vLLM since the last one that gave tokens.
        self.num_computed = 0
        self._steps_without = 0

    def in_words(self) -> str:
        """What it is, in words."""
        return in_words(self._settings, library.version(), is_merged=self._merges)

    # -- sampling

    def check(self, request: GenerationRequest) -> None:
        """Raise ValueError where prompt and completion together are longer than vLLM holds, which would cut
        the completion without a word, and RuntimeError where there are no weights."""
        prompt, new = len(request.prompt_token_ids), request.sampling.max_new_tokens
        check_stop_strings(request, self._tokenizer)
        if prompt == 0:
            raise ValueError(tr("A prompt has no tokens."))
        self._images.check(request)
        if request.sampling.has_filters and not vllm_lists(request.sampling.top_k):
            raise ValueError(
                tr("vLLM reports which tokens it kept only with --top_k 1 to {most:,}.", most=MOST_LISTED)
            )
        if prompt + new > self._settings.max_model_len:
            raise ValueError(
                tr(
                    "A prompt of {prompt} tokens plus {new} new ones is longer than this vLLM "
                    "allows: {max_model_len} (--vllm_max_model_len).",
                    prompt=prompt,
                    new=new,
                    max_model_len=self._settings.max_model_len,
                )
            )
        if not self._has_weights:
            raise RuntimeError(
                tr("This vLLM has no weights: nothing was published since it started or was put to sleep.")
            )

    def submit(self, request: GenerationRequest) -> int:
        """Hand a request to vLLM; raises what `check` does."""
        self.check(request)
        self._wake(_WEIGHTS, _CACHE)
        number = self.next_id
        self.next_id += 1
        sampling, vocab = request.sampling, 0
        if sampling.has_filters and not library.is_greedy(sampling.temperature):
            vocab = self._llm.llm_engine.model_config.get_vocab_size()
        listed = library.num_listed(sampling, vocab)
        self._llm.llm_engine.add_request(
            str(number),
            self._images.prompt(request),
            library.sampling_params(request, listed),
            lora_request=self._adapter,
        )
        search = search_for(request, self._tokenizer)
        self._running[number] = Running(request, time.perf_counter(), search, listed, vocab)
        return number

    def results(self) -> Iterator[Completion]:
        """Sample until nothing is left; requests may come meanwhile."""
        while True:
            self.on_turn()
            if not self.is_busy:
                return
            yield from self.step()

    @property
    def is_busy(self) -> bool:
        """Whether a request has not come back yet."""
        return bool(self._running or self._aborted)

    def step(self) -> list[Completion]:
        """Return what was aborted, or else what has ended with one step of vLLM."""
        if self._aborted:
            ended, self._aborted = self._aborted, []
            return ended
        ended = []
        outputs = self._llm.llm_engine.step()
        drawn = [(output.request_id, new.token_ids) for output in outputs for new in output.outputs]
        if self._comm.world > 1:
            self.digest = zlib.crc32(str(drawn).encode(), self.digest)
        self._count(sum(len(tokens) for _, tokens in drawn))
        for output in outputs:
            number = int(output.request_id)
            running = self._running.get(number)
            if running is None:
                continue
            if not running.tokens:
                check_prompt(running.request, output.prompt_token_ids)
            (new,) = output.outputs
            is_stopped = running.take(new, self._version)
            if is_stopped or output.finished:
                del self._running[number]
                if not output.finished:
                    self._llm.llm_engine.abort_request([output.request_id])
                finish = Finish.STOP if is_stopped else finish_of(new.finish_reason)
                ended.append(running.completion(number, finish))
        return ended

    def _count(self, num_new: int) -> None:
        """Count the tokens of a step. One that gives none computes part of a prompt, at least one token."""
        self._steps_without = 0 if num_new else self._steps_without + 1
        prompts = sum(len(running.request.prompt_token_ids) for running in self._running.values())
        self.num_computed += num_new or int(self._steps_without <= prompts)

    def abort(self, ids: Sequence[int]) -> None:
        """End requests now; they keep what has been sampled."""
        known = [number for number in ids if number in self._running]
        if known:
            self._llm.llm_engine.abort_request([str(number) for number in known])
        self._aborted += [self._running.pop(number).completion(number, Finish.ABORT) for number in known]

    # -- weights

    def publish(self, named_weights: NamedWeights, version: int) -> Receipt:
        """Serve these weights as `version`, one tensor after the other, with an empty prefix cache; the
        matrices of an adapter come behind a base, or alone for the one that is there.

        The receipt has the checksums of what vLLM's workers hold now; `unread` names the tensors of which
        they hold a packed form alone, as the CPU build does of linear layers. ValueError for an adapter that
        this vLLM does not apply, and for what it does not take while requests run.
        """
        if self._running and not self.capabilities.swaps:
            raise ValueError(tr("this vLLM does not take weights while requests run"))
        matrices: dict[str, Tensor] = {}

        def take() -> tuple[list[Parts], list[Parts]]:
            self._take_weights(named_weights, version, matrices)
            parts = self._llm.collective_rpc("covey_parts", args=(list(self._numel),))
            if not matrices:
                return parts, []
            self._use_adapter(self._written(matrices), version)
            args = (self._adapter.lora_int_id, rank_of(matrices), list(matrices))
            return parts, self._llm.collective_rpc("covey_adapter_parts", args=args)

        parts, of_adapter = self._on_all_ranks(take, named_weights)
        held = whole(parts, self._numel)
        fingerprints, unread = dict(held.fingerprints), held.unread
        if matrices:
            own = whole_adapter(of_adapter, {name: tensor.numel() for name, tensor in matrices.items()})
            fingerprints, unread = fingerprints | own.fingerprints, (*unread, *own.unread)
        self._begin(version)
        return Receipt(version=version, fingerprints=fingerprints, unread=unread)

    def _on_all_ranks(
        self, take: Callable[[], tuple[list[Parts], list[Parts]]], weights: NamedWeights
    ) -> tuple[list[Parts], list[Parts]]:
        """What `take` gives of the workers of all ranks, or on all of them what it failed with on one."""
        failure: Exception | None = None
        own: tuple[list[Parts], list[Parts]] = [], []
        try:
            own = take()
        except Exception as error:  # noqa: BLE001 - raised below, once the other ranks know
            failure = error
            # The other ranks still gather what is left.
            for _ in weights if self._comm.world > 1 else ():
                pass
        raise_on_all_ranks(self._comm, failure)
        every = self._comm.gather_json(own)
        return [p for parts, _ in every for p in parts], [p for _, parts in every for p in parts]

    def _take_weights(self, named_weights: NamedWeights, version: int, matrices: dict[str, Tensor]) -> None:
        """Take a base, and put the matrices of an adapter into `matrices`; or these alone."""
        base = Sent(version=version)
        first = next(named_weights, None)
        weights = named_weights if first is None else chain([first], named_weights)
        self._wake(_WEIGHTS)
        # What breaks off leaves a mixture of two versions.
        self._has_weights = False
        self._use_adapter(None)
        if first is None or not is_of_adapter(first[0]):
            self._base, self._numel = None, {}
            self._load(self._of_base(weights, base, matrices))
            self._base = base
        elif self._base is None:
            raise ValueError(tr("an adapter was sent, but this vLLM has not received its base model"))
        else:
            matrices.update((name, _on_cpu(tensor)) for name, tensor in weights)
            if odd := [name for name in matrices if not is_of_adapter(name)]:
                raise ValueError(
                    tr("{odd} was sent after the matrices of an adapter, and is none of them", odd=odd[0])
                )

    def held_base(self) -> str:
        """The digest of the weights that were sent last, without an adapter."""
        return "" if self._base is None else self._base.digest

    def _of_base(self, weights: NamedWeights, base: Sent, matrices: dict[str, Tensor]) -> NamedWeights:
        """The weights but for the matrices of an adapter, which are put aside: they are small."""
        for name, tensor in weights:
            if is_of_adapter(name):
                matrices[name] = _on_cpu(tensor)
                continue
            self._numel[name] = tensor.numel()
            if self.capabilities.adapter_rank:
                base.add(name, tensor)
            yield name, tensor.detach()

    def _load(self, weights: NamedWeights) -> None:
        if self.workers is None:
            self._llm.collective_rpc("covey_load", args=(weights,))
        else:
            self.workers.load(weights)

    def _written(self, matrices: Mapping[str, Tensor]) -> tempfile.TemporaryDirectory[str]:
        """The files that vLLM reads an adapter from; its scale is in B already."""
        rank, most = rank_of(matrices), self.capabilities.adapter_rank
        if rank > most:
            without = (
                tr("was started without LoRA")
                if not most
                else tr("accepts adapters up to rank {most}", most=most)
            )
            raise ValueError(
                tr("an adapter of rank {rank} was sent, but this vLLM {without}", rank=rank, without=without)
            )
        return write_adapter(matrices, rank)

    def _use_adapter(self, files: tempfile.TemporaryDirectory[str] | None, version: int = -1) -> None:
        """Sample with another adapter from now on, under a name that was never used, or with none."""
        former, former_files = self._adapter, self._adapter_files
        self._num_publishes += 1
        self._adapter, self._adapter_files = None, files
        if former is not None:
            self._llm.llm_engine.remove_lora(former.lora_int_id)
        if former_files is not None:
            former_files.cleanup()
        if files is not None:
            name = f"covey@{version}.{self._num_publishes}"
            self._adapter = library.adapter_request(name, self._num_publishes, files.name)
            try:
                if not self._llm.llm_engine.add_lora(self._adapter):
                    raise RuntimeError(tr("vLLM did not load the adapter {name}.", name=name))
            except ValueError as error:
                merged = tr(
                    "With --vllm_enable_lora false the adapter is merged into the weights before they "
                    "are sent."
                )
                raise ValueError(
                    tr("vLLM does not accept the adapter: {error} {merged}", error=error, merged=merged)
                ) from error

    def _begin(self, version: int) -> None:
        """Sample as a version: what was computed with former weights is forgotten first, that of requests
        that run too, which vLLM computes again."""
        self._wake(_CACHE)
        if not self._llm.reset_prefix_cache(reset_running_requests=bool(self._running)):
            raise RuntimeError(
                tr(
                    "vLLM did not clear its prefix cache when version {version} was published: "
                    "requests are still running.",
                    version=version,
                )
            )
        if self._settings.media_limits:
            # Features of images, which its tower has computed with former weights.
            self._llm.llm_engine.reset_encoder_cache()
        self._version, self._has_weights = version, True

    # -- memory

    def rest(self) -> None:
        """Sleep where it is set to; at level 2 the weights are gone after it."""
        if not self._settings.sleeps or self._asleep or self._running:
            return
        self._llm.sleep(level=self._settings.sleep_level)
        self._asleep = {_WEIGHTS, _CACHE}
        if self._settings.sleeps_deeply:
            self._has_weights, self._base = False, None

    def take_notices(self) -> list[Finding]:
        """Return no findings: this engine survives no fault that it would have to report."""
        return []

    def close(self) -> None:
        """End vLLM, and its processes where it has any; the run's process group stays."""
        self._use_adapter(None)
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None

    def _wake(self, *tags: str) -> None:
        for tag in tags:
            if tag in self._asleep:
                self._llm.wake_up(tags=[tag])
                self._asleep.remove(tag)


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
