"""Loss and gradient of covey's first step on written rollouts.

Run as `python gradient_covey.py SPEC.json RESULT.json`. With `sample` in the spec the rollout is drawn first,
and its log kept where the spec says.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from side_covey import options

# About the tokens of a prompt.
_PROMPT = 16


def main(spec: dict[str, Any], work: Path) -> dict[str, float]:
    """Write the gradient to `gradient_file`, and return the loss."""
    from safetensors.torch import save_file

    from covey.learner.backends.single import SingleBackend

    replay = Path(spec["rollouts"])
    if spec["sample"]:
        _train(options(spec, work))
        shutil.copytree(work / "covey" / "rollouts", replay)
    step = SingleBackend.step

    def watched(self: SingleBackend, rate: float) -> Any:
        # The policy holds the model under the name `model`.
        gradients = {name.removeprefix("model."): g for name, g in self.masters.gradients().items()}
        save_file(gradients, spec["gradient_file"])
        return step(self, rate)

    SingleBackend.step = watched  # type: ignore[method-assign,assignment]
    # A pass of every micro-batch: of a small model covey would take several together.
    row = _PROMPT + spec["max_completion_length"]
    cut = {"max_tokens_per_micro_batch": spec["per_device_train_batch_size"] * row}
    _train({**options(spec, work), **cut, "replay_rollouts": str(replay)})
    line = json.loads((work / "covey" / "metrics.jsonl").read_text().splitlines()[0])
    return {"loss": line["loss"]}


def _train(chosen: dict[str, Any]) -> None:
    from covey.config.resolve import from_dict
    from covey.training.run import train

    train(from_dict(chosen))


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]).parent)
    Path(sys.argv[2]).write_text(json.dumps(result))
