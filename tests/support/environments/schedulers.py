"""Schedulers and gym environments as they are written for ms-swift.

`each` makes the trajectory of a row by the scheduler that its column `kind` names, so that one process serves
many tests.
"""

import asyncio
import contextlib
import random
import time

from swift.infer_engine.protocol import RequestConfig, RolloutOutput
from swift.rollout.gym_env import Env, envs
from swift.rollout.multi_turn import GYMScheduler, MultiTurnScheduler, RolloutScheduler, multi_turns

CLOSED = []


class Again(MultiTurnScheduler):
    """Asks again, up to `rounds` turns of the row."""

    def check_finished(self, request, choice, turn):
        return turn >= request.data_dict.get("rounds", 2)

    def step(self, request, choice, turn):
        request.messages.append({"role": "user", "content": f"Again, {turn}?"})
        return {"infer_request": request, "rollout_infos": {"asked": turn}}


class AsyncAgain(Again):
    """All hooks are coroutines, as the code of ms-swift awaits them."""

    async def on_trajectory_start(self, requests):
        await asyncio.sleep(0)
        for request in requests:
            request.messages = [{"role": "user", "content": f"Begin {random.random()}"}]

    async def on_turn_end(self, request, choice, turn):
        await asyncio.sleep(0)
        return {"done": turn >= 2, "rollout_infos": {f"turn{turn}": choice.message.content}}

    async def check_finished(self, request, choice, turn):
        # It is asked, and what on_turn_end says counts.
        return turn < 2

    async def step(self, request, choice, turn):
        return super().step(request, choice, turn)


class Adds(Again):
    """The turn goes on behind a text, which the template has opened nothing of."""

    def step(self, request, choice, turn):
        request.messages[-1]["content"] += " But wait,"
        return {"infer_request": request}


class Marks(Again):
    """It ends the thought of the turn, in words that hold a mark of the template, too."""

    def step(self, request, choice, turn):
        request.messages[-1]["content"] += "</think><|im_end|>So "
        return {"infer_request": request}


class CutsAndAdds(Again):
    """The turn is cut behind its first words, and goes on behind another text."""

    def step(self, request, choice, turn):
        text = request.messages[-1]["content"]
        request.messages[-1]["content"] = text[: text.index("six")] + "five?"
        return {"infer_request": request}


class GoesOn(Again):
    """The turn goes on where it stands."""

    def step(self, request, choice, turn):
        return {"infer_request": request}


class Rewrites(Again):
    """The turn becomes another text before the user speaks again."""

    def step(self, request, choice, turn):
        request.messages[-1]["content"] = request.messages[-1]["content"].upper()
        return super().step(request, choice, turn)


class Compresses(Again):
    """The history becomes one message."""

    def step(self, request, choice, turn):
        request.messages = [{"role": "user", "content": "Short."}]
        return {"infer_request": request}


class Prefills(Again):
    """The next turn begins with words of the scheduler."""

    def step(self, request, choice, turn):
        request.messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "It is"}]
        return {"infer_request": request}


class PrefillsFirst(Again):
    """The first turn begins with words of the scheduler."""

    def on_trajectory_start(self, requests):
        words = requests[0].data_dict.get("words", "It is")
        requests[0].messages.append({"role": "assistant", "content": words})

    async def run(self, request, config, **kwargs):
        self.on_trajectory_start([request])
        response = await self.infer_engine.infer_async(request, config)
        request.messages[-1]["content"] += response.choices[0].message.content
        self.step(request, response.choices[0], 1)
        response = await self.infer_engine.infer_async(request, config)
        request.messages.append({"role": "assistant", "content": response.choices[0].message.content})
        return RolloutOutput(response=response, messages=request.messages)


class Sums(MultiTurnScheduler):
    """Three sums, one after the other, as support.sums asks for them; with `adds` of the row half of the last
    turn is cut, and it goes on instead."""

    def on_trajectory_start(self, requests):
        # Its seed is that of the generators.
        self.draws = getattr(self, "draws", {})
        draw = self.draws[requests[0].uuid] = random.Random()
        draw.setstate(random.getstate())
        requests[0].messages = [self.ask(requests[0])]

    def ask(self, request):
        draw = self.draws[request.uuid]
        return {"role": "user", "content": f"{draw.randrange(10)}+{draw.randrange(10)}="}

    def check_finished(self, request, choice, turn):
        return turn == 3 or choice.finish_reason == "length"

    def step(self, request, choice, turn):
        if request.data_dict.get("adds"):
            text, said = request.messages[-1]["content"], choice.message.content
            request.messages[-1]["content"] = text[: len(text) - len(said) // 2] + "5+5"
        else:
            request.messages.append(self.ask(request))
        return {"infer_request": request}


class Own(Again):
    """`step` says which tokens are trained, and more, as the row says."""

    def step(self, request, choice, turn):
        row, ids = request.data_dict, list(choice.token_ids)
        found = {"response_token_ids": ids + row.get("more_ids", [])}
        if "mask" in row:
            found["response_loss_mask"] = row["mask"] or [0] * len(ids)
        if "logprobs" in row:
            found["rollout_logprobs"] = row["logprobs"] * len(ids)
        return {**super().step(request, choice, turn), **found}


class TrainsNothing(Again):
    async def run(self, request, config, **kwargs):
        output = await super().run(request, config, **kwargs)
        output.response_loss_mask = [[0] * len(ids) for ids in output.response_token_ids]
        return output


class Single(RolloutScheduler):
    """A run of its own that returns one output, of the last turn alone."""

    async def run(self, request, config, **kwargs):
        for _ in range(2):
            response = await self.infer_engine.infer_async(request, config)
            request.messages.append({"role": "assistant", "content": response.choices[0].message.content})
            request.messages.append({"role": "user", "content": "And?"})
        del request.messages[-1]
        return RolloutOutput(
            response=response,
            messages=request.messages,
            response_token_ids=response.choices[0].token_ids,
            rollout_infos={"tokens": response.usage.completion_tokens},
        )


class Several(RolloutScheduler):
    """A run of its own that returns an output for each turn."""

    async def run(self, request, config, **kwargs):
        outputs = []
        for number in range(3):
            response = await self.engine.infer_async(request, config)
            request.messages.append({"role": "assistant", "content": response.choices[0].message.content})
            ids = list(response.choices[0].token_ids)
            outputs.append(
                RolloutOutput(
                    response=response,
                    messages=[*request.messages],
                    response_token_ids=[ids],
                    response_loss_mask=[[1] * len(ids)],
                    rollout_infos={"part": number, "uuid": request.uuid},
                )
            )
            request.messages.append({"role": "user", "content": f"Part {number}."})
        return outputs


class Gathers(RolloutScheduler):
    """Asks for three things at once."""

    async def run(self, request, config, **kwargs):
        prompts = [{"messages": [{"role": "user", "content": f"Say {n}."}]} for n in range(3)]
        responses = await asyncio.gather(*(self.infer_engine.infer_async(p, config) for p in prompts))
        texts = [response.choices[0].message.content for response in responses]
        return RolloutOutput(response=responses[-1], messages=[], rollout_infos={"texts": texts})


class Configured(RolloutScheduler):
    """The request has the sampling settings of the row."""

    async def run(self, request, config, **kwargs):
        for name, value in request.data_dict["config"].items():
            setattr(config, name, value)
        return await super().run(request, config, **kwargs)


class Extends(RolloutScheduler):
    """The request has what the row says."""

    async def run(self, request, config, **kwargs):
        for name, value in request.data_dict["more"].items():
            setattr(request, name, value)
        return await super().run(request, config, **kwargs)


class Unconfigured(RolloutScheduler):
    """It makes the settings itself."""

    async def run(self, request, config, **kwargs):
        own = RequestConfig(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p, min_p=0.0)
        return await super().run(request, own, **kwargs)


class Endless(RolloutScheduler):
    """It never returns; with `is_told` of the row it does, once a turn was cut."""

    async def run(self, request, config, **kwargs):
        finishes = []
        while True:
            response = await self.infer_engine.infer_async(request, config)
            choice = response.choices[0]
            finishes.append(choice.finish_reason)
            request.messages.append({"role": "assistant", "content": choice.message.content})
            request.messages.append({"role": "user", "content": "More."})
            if request.data_dict.get("is_told") and choice.finish_reason == "length":
                infos = {"finishes": finishes, "last": choice.message.content}
                return RolloutOutput(response=response, messages=request.messages, rollout_infos=infos)


class Raises(Again):
    def step(self, request, choice, turn):
        raise KeyError("no such tool")


class Exits(Again):
    def step(self, request, choice, turn):
        raise SystemExit(3)


class Cancels(Again):
    def step(self, request, choice, turn):
        raise asyncio.CancelledError


class FailsBeside(RolloutScheduler):
    """Asks for two turns at once, beside what fails."""

    async def run(self, request, config, **kwargs):
        async def fails():
            raise ValueError("beside")

        turns = [self.infer_engine.infer_async(request, config) for _ in range(2)]
        await asyncio.gather(*turns, fails())


class AsksOn(RolloutScheduler):
    """Returns while a task of its own is waiting for a turn, and another one will ask."""

    async def run(self, request, config, **kwargs):
        output = await super().run(request, config, **kwargs)
        asked = [{"messages": [{"role": "user", "content": f"Say {n}."}]} for n in range(2)]
        self.tasks = [asyncio.ensure_future(self.infer_engine.infer_async(one, config)) for one in asked]
        for _ in range(3):
            await asyncio.sleep(0)
        return output


class GivesUp(Again):
    """Does not wait for its first turn."""

    async def run(self, request, config, **kwargs):
        try:
            await asyncio.wait_for(self.infer_engine.infer_async(request, config), 0.001)
        except TimeoutError:
            request.messages[-1]["content"] = "Sooner?"
        return await super().run(request, config, **kwargs)


class Stubborn(Again):
    """It never begins, and cannot be cancelled."""

    async def on_trajectory_start(self, requests):
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)


class Waits(Again):
    async def on_turn_end(self, request, choice, turn):
        await asyncio.sleep(60)


class Blocks(Again):
    def on_turn_end(self, request, choice, turn):
        time.sleep(60)


class Returns(RolloutScheduler):
    """It returns something else, with or without a turn of the model."""

    async def run(self, request, config, **kwargs):
        if request.data_dict["value"] is not None:
            await self.infer_engine.infer_async(request, config)
        return request.data_dict["value"]


class StepsNowhere(MultiTurnScheduler):
    """It has no `step`."""


class Tokenizes(Again):
    """It reads the tokenizer of the model."""

    def step(self, request, choice, turn):
        text = self.tokenizer.decode(choice.token_ids, skip_special_tokens=True)
        return {**super().step(request, choice, turn), "rollout_infos": {"decoded": text}}


class Looks(Again):
    """It shows the picture of its request again, as the first of two."""

    def step(self, request, choice, turn):
        request.images = [*request.images, request.images[0]]
        request.messages.append({"role": "user", "content": "Look <image> again."})
        return {"infer_request": request}


class Counting(Env):
    """Asks for the number that it has drawn: 1 for the right one, which ends it, 0.25 for any other."""

    async def reset(self, config):
        self.number, self.turns = random.randrange(1000), 0
        self.fails = config.data_dict.get("fails")
        return f"Think of {self.number}.", {}, "You count."

    async def step(self, action):
        self.turns += 1
        if self.fails:
            raise RuntimeError("no board")
        is_right = str(self.env_config.get("wanted", 6)) in action[-1]["content"]
        return f"No, {self.turns}.", 1.0 if is_right else 0.25, is_right, {}

    async def close(self):
        CLOSED.append(self.number)


class SyncCounting(Counting):
    """Its methods are no coroutines."""

    def reset(self, config):
        self.number, self.turns, self.fails = -1, 0, None
        return f"{len(CLOSED)} were closed.", {}, ""

    def step(self, action):
        return "No.", 0.5, True, {}

    def close(self):
        CLOSED.append(self.number)


class ClosesEarly(GYMScheduler):
    """It makes its environment itself, and closes it before the second turn."""

    async def on_trajectory_start(self, requests):
        for request in requests:
            env = self._envs[request.uuid] = Counting({})
            said, _, _ = await env.reset(request)
            request.messages = [{"role": "user", "content": said}]

    async def on_turn_end(self, request, choice, turn):
        if turn == 2:
            await self._close_and_remove(request.uuid)
        return await super().on_turn_end(request, choice, turn)


class Each(MultiTurnScheduler):
    """Has the scheduler of the row's `kind` make the trajectory."""

    async def run(self, request, config, **kwargs):
        row = request.data_dict
        own = multi_turns[row["kind"]](self.infer_engine, row.get("most"), gym_env=row.get("gym"))
        return await own.run(request, config, **kwargs)


for kind in list(globals().values()):
    if isinstance(kind, type) and issubclass(kind, RolloutScheduler):
        multi_turns[kind.__name__] = kind
envs.update(counting=Counting, sync_counting=SyncCounting)
