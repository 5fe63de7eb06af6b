"""The reward `judge`, in its worker: a model behind an OpenAI-compatible service answers a question on each
completion, and its answer holds the reward."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from covey.rewards.callee import RowFault
from covey.rewards.judge_text import NoReward, reward_in, reward_pattern, row_limit_s
from covey.texts import replaced, tr

# What openai's client asks for where no key is needed.
_NO_KEY = "none"
_NOTED = 2_000
_SHOWN = 300


class JudgeOptions(Protocol):
    """The options of a run that the reward reads."""

    judge_base_url: str
    judge_model: str
    judge_regex: str
    judge_concurrency: int
    judge_retries: int
    judge_timeout_s: float


class Judge:
    """Asks the service, `judge_concurrency` questions at a time; the key is OPENAI_API_KEY of the environment
    and stands in nothing that is written."""

    def __init__(self, args: JudgeOptions) -> None:
        self._args = args
        self._pattern = reward_pattern(args.judge_regex)
        self._key = os.environ.get("OPENAI_API_KEY") or _NO_KEY
        self._client: Any = None

    async def __call__(
        self, *, questions: Sequence[str], log_extra: Callable[[str, list[Any]], None]
    ) -> list[float | RowFault]:
        """The reward of each question; `log_extra("judge_answer", …)` receives what was answered."""
        if self._client is None:
            # It belongs to the event loop, which is the same for every call.
            self._client = self._connect()
        gate = asyncio.Semaphore(self._args.judge_concurrency)
        answers = await asyncio.gather(*(self._answer(gate, text) for text in questions))
        log_extra("judge_answer", [a[-_NOTED:] if isinstance(a, str) else None for a in answers])
        return [self._reward(answer) for answer in answers]

    def _connect(self) -> Any:
        import openai

        args = self._args
        return openai.AsyncOpenAI(
            base_url=args.judge_base_url,
            api_key=self._key,
            max_retries=args.judge_retries,
            timeout=args.judge_timeout_s,
        )

    async def _answer(self, gate: asyncio.Semaphore, question: str) -> str | RowFault:
        import openai

        limit_s = row_limit_s(self._args.judge_retries, self._args.judge_timeout_s)
        async with gate:
            try:
                async with asyncio.timeout(limit_s):
                    reply = await self._client.chat.completions.with_raw_response.create(
                        model=self._args.judge_model,
                        messages=[{"role": "user", "content": question}],
                        temperature=0,
                    )
                body = reply.http_response.json()
                text = body["choices"][0]["message"]["content"]
            except TimeoutError:
                return _no_answer(tr("the judge gave no answer within {limit_s:g} s", limit_s=limit_s))
            except openai.OpenAIError as error:
                words = tr("the judge: {name}: {error!s:.80}", name=type(error).__name__, error=error)
                return _no_answer(self._without_key(words))
            except (ValueError, LookupError, TypeError) as error:
                words = tr(
                    "the judge's answer is not a chat completion: {name}: {error!s:.80}",
                    name=type(error).__name__,
                    error=error,
                )
                return _no_answer(self._without_key(words))
        if not isinstance(text, str):
            return _no_answer(tr("the judge's chat completion contains no text"))
        return self._without_key(text)

    def _reward(self, answer: str | RowFault) -> float | RowFault:
        if isinstance(answer, RowFault):
            return answer
        try:
            return reward_in(answer, self._pattern)
        except NoReward as error:
            return RowFault(str(error), cause="verdict")

    def _without_key(self, text: str) -> str:
        """The text; a service may repeat the key that it was given."""
        return text if self._key == _NO_KEY else replaced(text, self._key, "***")


def _no_answer(words: str) -> RowFault:
    return RowFault(words, cause="judge")
