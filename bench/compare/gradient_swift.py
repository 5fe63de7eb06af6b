"""Loss and gradient of ms-swift's first step on written rollouts.

Run as `python gradient_swift.py SPEC.json RESULT.json`. As with TRL, only what it would generate is given to
it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gradient_trl import gradient_saver
from recorded import Recorded
from side_swift import arguments, register_reward


def main(spec: dict[str, Any], work: Path) -> dict[str, float]:
    """Write the gradient to `gradient_file`, and return the loss."""
    from swift.pipelines.train.rlhf import SwiftRLHF
    from swift.rlhf_trainers.grpo_trainer import GRPOTrainer
    from swift.template import Template

    register_reward(spec["reward"])
    recorded = Recorded(Path(spec["rollouts"]))
    losses: list[float] = []
    compute = GRPOTrainer.compute_loss

    def computed(self: Any, *positional: Any, **kwargs: Any) -> Any:
        loss = compute(self, *positional, **kwargs)
        # The trainer divides by the accumulation before the backward pass.
        losses.append(float(loss.detach()) / spec["gradient_accumulation_steps"])
        return loss

    def generated(self: Any, model: Any, **kwargs: Any) -> dict[str, Any]:
        return {"sequences": _with_completions(kwargs["input_ids"], kwargs["attention_mask"], recorded, self)}

    GRPOTrainer.compute_loss = computed
    Template.generate = generated

    class Replayed(SwiftRLHF):
        def train(self, trainer: Any) -> Any:
            trainer.add_callback(gradient_saver(spec["gradient_file"]))
            return super().train(trainer)

    Replayed([*arguments(spec, work), "--max_grad_norm", "0"]).main()
    return {"loss": sum(losses)}


def _with_completions(input_ids: Any, attention_mask: Any, recorded: Recorded, template: Any) -> Any:
    """Padded prompts with their written completions, as `generate` would return them."""
    import torch

    prompts = [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]
    tails = [torch.tensor(recorded.take(prompt)) for prompt in prompts]
    padded = torch.nn.utils.rnn.pad_sequence(
        tails, batch_first=True, padding_value=template.tokenizer.pad_token_id
    )
    return torch.cat([input_ids, padded], dim=1)


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]).parent)
    Path(sys.argv[2]).write_text(json.dumps(result))
