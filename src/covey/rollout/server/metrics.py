"""What a rollout server has done, as text that Prometheus reads (its text format, version 0.0.4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from covey.types import Completion, Finish

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(slots=True)
class Counts:
    """Sums since the server started. Requests that ended and publishes are counted by how they ended; tokens
    are those of completions, seconds those that completions and whole publishes took."""

    requests: int = 0
    ended: Counter[Finish] = field(default_factory=Counter)
    tokens: int = 0
    completion_s: float = 0.0
    publishes: Counter[bool] = field(default_factory=Counter)
    publish_s: float = 0.0

    def count_completion(self, completion: Completion) -> None:
        """A request has ended."""
        self.ended[completion.finish] += 1
        self.tokens += len(completion.token_ids)
        self.completion_s += completion.seconds

    def count_publish(self, seconds: float, *, is_whole: bool) -> None:
        """A publish has ended; `is_whole` says that the server has its version."""
        self.publishes[is_whole] += 1
        self.publish_s += seconds if is_whole else 0.0


def metrics_text(
    counts: Counts, *, unfinished: int, rows: int, computed: int, version: int, processes: int
) -> str:
    """The metrics of a server. `unfinished` requests are queued or sampled, of which `rows` at most side by
    side; the engine has `computed` tokens, those of prompts too; `processes` of a run use the server."""
    running = min(unfinished, rows)
    by_finish = {f'finish="{finish}"': counts.ended[finish] for finish in Finish}
    by_result = {'result="whole"': counts.publishes[True], 'result="failed"': counts.publishes[False]}
    metrics: tuple[tuple[str, str, float | Mapping[str, float]], ...] = (
        ("requests_total", "Requests that runs have sent.", counts.requests),
        (
            "completions_total",
            "Requests that have ended: by a stop token, at their length, aborted.",
            by_finish,
        ),
        ("completion_tokens_total", "Tokens of ended completions.", counts.tokens),
        ("completion_seconds_total", "Seconds that ended completions took, added up.", counts.completion_s),
        ("computed_tokens_total", "Tokens that the engine computed, those of prompts too.", computed),
        ("publishes_total", "Publishes of weights that have ended.", by_result),
        ("publish_seconds_total", "Seconds that whole publishes took.", counts.publish_s),
        ("requests_running", "Unfinished requests, up to the rows that run side by side.", running),
        ("requests_queued", "Unfinished requests beyond these rows.", unfinished - running),
        ("weights_version", "Version of the weights; -1 while there is none.", version),
        ("run_processes", "Processes of the run that uses the server.", processes),
    )
    return "".join(_metric(f"covey_rollout_{name}", words, value) for name, words, value in metrics)


def _metric(name: str, words: str, value: float | Mapping[str, float]) -> str:
    """A metric with one value, or with one for each of its labels."""
    kind = "counter" if name.endswith("_total") else "gauge"
    values = value if isinstance(value, Mapping) else {"": value}
    lines = [f"{name}{{{label}}} {one}" if label else f"{name} {one}" for label, one in values.items()]
    return "\n".join((f"# HELP {name} {words}", f"# TYPE {name} {kind}", *lines, ""))
