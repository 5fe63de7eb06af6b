"""Loss and gradient of TRL's first step on written rollouts.

Run as `python gradient_trl.py SPEC.json RESULT.json`. The step is TRL's own from the tokens on: it tokenizes
the prompts, decodes the completions, scores them, takes its own advantages, denominators and loss. Only what
it would generate is given to it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from recorded import Recorded
from side_trl import settings


def main(spec: dict[str, Any], work: Path) -> dict[str, float]:
    """Write the gradient to `gradient_file`, and return the loss."""
    import datasets
    import rewards
    import trl

    recorded = Recorded(Path(spec["rollouts"]))
    losses: list[float] = []

    class Replayed(trl.GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *arguments: Any, **kwargs: Any) -> Any:
            return [recorded.take(ids) for ids in prompt_ids], None

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            loss = super()._compute_loss(model, inputs)
            losses.append(float(loss.detach()))
            return loss

    rows = [json.loads(line) for line in Path(spec["data_file"]).read_text().splitlines()]
    trainer = Replayed(
        model=spec["model_dir"],
        reward_funcs=getattr(rewards, spec["reward"]),
        args=settings(spec, work, max_grad_norm=0.0),
        train_dataset=datasets.Dataset.from_list(rows),
        callbacks=[gradient_saver(spec["gradient_file"])],
    )
    trainer.train()
    return {"loss": sum(losses)}


def gradient_saver(target: str) -> Any:
    """A callback that writes the gradient in front of the optimizer."""
    import transformers
    from safetensors.torch import save_file

    class Save(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            named = kwargs["model"].named_parameters()
            save_file({name: p.grad.clone() for name, p in named if p.grad is not None}, target)

    return Save()


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]).parent)
    Path(sys.argv[2]).write_text(json.dumps(result))
