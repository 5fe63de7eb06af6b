"""ms-swift's plugin files, run unchanged where ms-swift is not installed."""

from __future__ import annotations

import textwrap

import pytest

from covey.rewards.protocol import TrainerState
from covey.rewards.reward_set import RewardSet
from covey.types import Status

PLUGIN = """
    import asyncio
    import re
    from dataclasses import dataclass
    from typing import Dict, List, Optional
    {imports}

    logger = get_logger()


    class Tags(ORM):

        def __call__(self, completions, **kwargs) -> List[float]:
            return [1.0 if re.match("<answer>.*</answer>", c) else 0.0 for c in completions]


    class Early(ORM):

        def __init__(self):
            self.most = 0.5

        def __call__(self, completions, solution, **kwargs):
            step = kwargs.get("trainer_state").global_step
            assert kwargs["messages"][0][-1]["content"] == completions[0]
            assert kwargs["finish_reason"] == ["stop"] * len(completions)
            return [self.most if s == c and step < 5 else 0.0 for c, s in zip(completions, solution)]


    class Judge(AsyncORM):

        async def __call__(self, completions, **kwargs):
            async def one(text):
                await asyncio.sleep(0.01)
                return float(len(text))
            return await asyncio.gather(*[one(c) for c in completions])


    class Long(ORM):

        def __init__(self, args=None, **kwargs):
            super().__init__(args)
            self.most = args.soft_max_length

        def __call__(self, completions, **kwargs):
            return [self.most - sum(map(len, kwargs["response_token_ids"]))] * len(completions)


    class Twice(orms["accuracy"]):

        def __call__(self, completions, solution, **kwargs):
            return [2 * v for v in super().__call__(completions, solution, **kwargs)]


    class Both(ORM):

        def __call__(self, completions, **kwargs):
            said = orms["accuracy"]()(completions, **kwargs), orms["format"]()(completions, **kwargs)
            return [a + b for a, b in zip(*said)]


    orms["my_tags"] = Tags
    orms["my_early"] = Early
    orms["my_judge"] = Judge
    orms["my_long"] = Long
    orms["my_twice"] = Twice
    orms["my_both"] = Both
    {more}
"""
OLD = {
    "imports": """
    from swift.llm import PtEngine, RequestConfig, Template, to_device
    from swift.llm.infer.protocol import ChatCompletionResponse
    from swift.plugin import ORM, AsyncORM, orms, rm_plugins
    from swift.plugin.multi_turn import MultiTurnScheduler, multi_turns
    from swift.plugin.rm_plugin import DefaultRMPlugin
    from swift.utils import get_logger
    """,
    "more": """
    class Model(DefaultRMPlugin):
        def __init__(self, model, template: Template, config: Optional[RequestConfig] = None):
            super().__init__(model, template)

    class Scheduler(MultiTurnScheduler):
        def step(self, infer_request: "PtEngine | None", choice: ChatCompletionResponse) -> Dict:
            return {}

    @dataclass
    class Config(RequestConfig):
        size: int = 1

    rm_plugins["my_model"] = Model
    multi_turns["my_scheduler"] = Scheduler
    """,
}
NEW = {
    "imports": """
    import swift
    from swift import rewards
    from swift.infer_engine import InferRequest
    from swift.rewards import ORM, AsyncORM, orms, rm_plugins
    from swift.rewards.orm import ORM as SameORM, orms as same_orms
    from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns
    from swift.utils import get_logger
    assert SameORM is ORM and same_orms is orms and rewards.orms is orms is swift.rewards.orms
    """,
    "more": "",
}


@pytest.fixture
def plugin(tmp_path):
    """`plugin(text)` writes a plugin file and returns its path."""

    def write(text: str, name: str = "plugin.py") -> str:
        (tmp_path / name).write_text(textwrap.dedent(text), encoding="utf-8")
        return str(tmp_path / name)

    return write


def filled(parts: dict[str, str]) -> str:
    text = textwrap.dedent(PLUGIN)
    return text.format(**{name: textwrap.dedent(part) for name, part in parts.items()})


@pytest.mark.parametrize("style", [OLD, NEW], ids=["swift.plugin", "swift.rewards"])
def test_a_plugin_file(style, plugin, scored):
    names = ("my_tags", "my_early", "my_judge", "my_long", "my_twice", "my_both", "accuracy")
    rows = [
        scored("<answer>72</answer>", solution="72"),
        scored("72", solution="72"),
        scored("", solution="1"),
    ]
    with RewardSet.start(
        names, plugins=[plugin(filled(style))], options={"soft_max_length": 10}, prompt_is_messages=True
    ) as rewards:
        assert (rewards.names, rewards.faults) == (names, ())
        judged = rewards.score(rows, TrainerState(global_step=4))
        late = rewards.score(rows, TrainerState(global_step=5))
    said = [[part.value for part in row.parts] for row in judged.rows]
    assert said == [
        [1.0, 0.0, 19.0, 4.0, 2.0, 1.0, 1.0],
        [0.0, 0.5, 2.0, 4.0, 2.0, 1.0, 1.0],
        [0.0, 0.0, 0.0, 4.0, 0.0, 0.0, 0.0],
    ], judged
    assert late.rows[1].parts[1].value == 0.0


def test_several_files_and_a_function_of_one(plugin, scored):
    first = plugin(
        """
        from swift.plugin import ORM, orms
        class A(ORM):
            def __call__(self, completions, **kwargs):
                return [1.0] * len(completions)
        orms['a'] = A
        def plain(completions):
            return [3.0] * len(completions)
        """,
        "first.py",
    )
    second = plugin(
        """
        from swift.rewards import orms
        def b(completions, **kwargs):
            return [2.0] * len(completions)
        class Mine(orms['a']):
            pass
        orms['b'] = b
        orms['accuracy'] = Mine
        """,
        "second.py",
    )
    entries = ["a", "b", "accuracy", f"{first}:plain"]
    # The names of `swift.plugin` and `swift.rewards` are one registry; a plugin may replace a built-in.
    with RewardSet.start(entries, plugins=[first, second]) as rewards:
        assert (rewards.names, rewards.faults) == (("a", "b", "accuracy", "plain"), ())
        judged = rewards.score([scored("x")], TrainerState())
    assert [part.value for part in judged.rows[0].parts] == [1.0, 2.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "import no_such_package",
            "ModuleNotFoundError: No module named 'no_such_package' (plugin.py, line 1: ",
        ),
        (
            "from swift.plugin import ormz",
            "ImportError: swift.plugin has no ormz in covey: swift.plugin.ormz is part of ms-",
        ),
        ("from swift.rewards.ormz import ORM", "No module named 'swift.rewards.ormz'"),
        (
            "from swift.llm import Engine\nEngine(1)",
            "NotImplementedError: swift.llm.Engine is part of ms-swift: install",
        ),
        (
            "from swift.llm import Engine\nEngine.load(1)",
            "AttributeError: swift.llm.Engine is part of ms-swift",
        ),
        (
            "from swift.llm import to_device\nto_device(1)",
            "swift.llm.to_device is part of ms-swift: install ms-",
        ),
    ],
)
def test_a_plugin_file_that_cannot_run(text, words, plugin):
    file = plugin(text)
    with RewardSet.start(["accuracy"], plugins=[file]) as rewards:
        (fault,) = rewards.faults
    assert (fault.reward, fault.kind) == (file, "import")
    assert fault.words.startswith("plugin.py cannot be imported: ")
    assert words in fault.words, fault.words


def test_an_unknown_name_is_compared_with_those_of_the_plugins(plugin):
    file = plugin("from swift.plugin import ORM, orms\norms['external_countdown'] = ORM\n")
    with RewardSet.start(["external_countdwn"], plugins=[file]) as rewards:
        (fault,) = rewards.faults
    assert fault.kind == "unknown"
    assert "the nearest name is external_countdown" in fault.words


def test_a_class_that_uses_what_is_not_there_fails_when_it_is_called(plugin, scored):
    file = plugin(
        """
        from swift.llm import PtEngine
        from swift.plugin import ORM, orms
        class A(ORM):
            def __call__(self, completions, **kwargs):
                return PtEngine('m').infer(completions)
        orms['a'] = A
        """
    )
    with RewardSet.start(["a"], plugins=[file]) as rewards:
        (part,) = rewards.score([scored("x")], TrainerState()).rows[0].parts
    assert part.status is Status.ERROR
    assert part.message == (
        "NotImplementedError: swift.llm.PtEngine is part of ms-swift: install ms-swift to use it "
        "(pip install ms-swift) "
        "(plugin.py, line 6: return PtEngine('m').infer(completions))"
    )


def test_ms_swift_itself_is_used_where_it_is_installed(plugin, scored, tmp_path, monkeypatch):
    folder = tmp_path / "site" / "swift"
    (folder / "rewards").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "rewards" / "__init__.py").write_text(
        "class ORM:\n    pass\nclass Accuracy(ORM):\n    pass\norms = {'accuracy': Accuracy}\nreal = True\n"
    )
    file = plugin(
        """
        from swift.rewards import ORM, orms, real
        class A(ORM):
            def __call__(self, completions, **kwargs):
                return [4.0]
        orms['a'] = A
        """
    )
    monkeypatch.syspath_prepend(folder.parent)
    with RewardSet.start(["a", "accuracy"], plugins=[file]) as rewards:
        assert rewards.faults == ()
        judged = rewards.score([scored("72", solution="72")], TrainerState())
    assert [part.value for part in judged.rows[0].parts] == [4.0, 1.0]


def test_the_rewards_of_ms_swift_as_classes(plugin, scored):
    """A plugin builds on them; their options are those of the run, which the worker gets as JSON."""
    file = plugin("""
        from swift.rewards import ORM, orms
        from swift.rewards.orm import CosineReward, RepetitionPenalty

        class Half(CosineReward):
            def __call__(self, completions, solution, **kwargs):
                return [v / 2 for v in super().__call__(completions, solution, **kwargs)]

        class Sum(ORM):
            def __init__(self, args=None, **kwargs):
                super().__init__(args)
                self.parts = [orms[name](args) for name in ("soft_overlong", "format", "react_format")]

            def __call__(self, completions, **kwargs):
                return [sum(values) for values in zip(*(p(completions, **kwargs) for p in self.parts))]

        class Repeats(RepetitionPenalty):
            pass

        orms["half"], orms["sum"], orms["repeats"], orms["tool"] = Half, Sum, Repeats, orms["toolbench"]
        """)
    options = {
        "cosine_min_len_value_wrong": -0.5,
        "cosine_max_len_value_wrong": 0.0,
        "cosine_min_len_value_correct": 1.0,
        "cosine_max_len_value_correct": 0.5,
        "cosine_max_len": 4,
        "repetition_n_grams": 1,
        "repetition_max_penalty": -2.0,
        "soft_max_length": 4,
        "soft_cache_length": 4,
    }
    rows = [
        scored("<think>a</think> <answer>5</answer>", solution="5"),
        scored("Action: a\nAction Input: b b", solution="Action: a\nAction Input: b"),
    ]
    names = ("half", "sum", "repeats", "tool")
    with RewardSet.start(names, plugins=[file], options=options) as rewards:
        assert rewards.faults == ()
        said = [[p.value for p in row.parts] for row in rewards.score(rows, TrainerState()).rows]
    # 2 tokens of 4: half way. The second gold is no answer that anything is compared with.
    assert said[0] == [0.75 / 2, -0.5 + 1.0 + 0.0, 0.0, None]
    assert said[1][1:] == [-0.5, pytest.approx(-2 * 1 / 6), pytest.approx(2 / 3)]


def test_a_file_that_is_no_python_is_not_imported(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("orms = {}\n", encoding="utf-8")
    with RewardSet.start(["accuracy"], plugins=[str(file), str(tmp_path / ("x" * 300))]) as rewards:
        assert [(fault.kind, fault.cause) for fault in rewards.faults] == [
            ("import", "no_python"),
            ("import", "no_file"),
        ]


def test_what_lists_of_golds_are_reaches_the_classes_of_ms_swift(plugin, scored):
    file = plugin("""
        from swift.rewards import orms

        class Own(orms["accuracy"]):
            pass

        orms["own"] = Own
        """)
    rows = [scored(text, solution=["5", "7"]) for text in (r"\boxed{7}", r"\boxed{7, 5}")]
    for lists, own in (("any", [1.0, 0.0]), ("all", [0.0, 1.0]), (None, [1.0, 0.0])):
        names = ("own", "accuracy")
        with RewardSet.start(names, plugins=[file], options={"gold_lists": lists}) as rewards:
            said = rewards.score(rows, TrainerState()).rows
        assert [[part.value for part in row.parts] for row in said] == [[value] * 2 for value in own]
