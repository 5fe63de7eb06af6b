"""A notebook: functions of its cells as rewards, lines while it trains, run after run, nothing kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

CELLS = (
    """
import gc
import torch
from datasets import Dataset
from covey.trl import GRPOConfig, GRPOTrainer

target = 20

def near(completions, **kwargs):
    return [-abs(target - len(c[0]["content"])) / 20 for c in completions]

async def short(completions, **kwargs):
    return [-len(c[0]["content"]) / 100 for c in completions]

rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{n}+1?"}]} for n in range(10, 26)])
args = GRPOConfig(
    "out", per_device_train_batch_size=16, max_completion_length=16, max_steps=2, logging_steps=1,
    learning_rate=1e-3,
)
trainer = GRPOTrainer("quickstart", [near, short], args, rows)
trainer.train().global_step
""",
    """
first = [log["rewards/near/mean"] for log in trainer.state.log_history if "reward" in log]
target = 200
trainer.train()
second = [log["rewards/near/mean"] for log in trainer.state.log_history if "reward" in log]
first[0] > second[0]
""",
    """
def held():
    gc.collect()
    return sum(o.numel() for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter))

del trainer
before = held()
GRPOTrainer("quickstart", lambda completions, **kwargs: near(completions), args, rows).train()
held() - before
""",
    "GRPOTrainer('quickstart', near, GRPOConfig('out', num_generations=1), rows).train()",
)


def outputs(cell: Any) -> str:
    return "".join(
        out.get("text", "") + (out.get("data") or {}).get("text/plain", "") + out.get("evalue", "")
        for out in cell.outputs
    )


def test_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    client = NotebookClient(
        notebook, timeout=300, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    one, two, three, four = map(outputs, notebook.cells)
    assert "step 1/2" in one and "step 2/2" in one and one.rstrip().endswith("2"), one
    # The closure has the value that the cell has given it since, and training went on.
    assert two.rstrip().endswith("True"), two
    assert three.rstrip().endswith("0"), three
    assert "E201" in four and "step 1" not in four
    assert (tmp_path / "out" / "earlier-2").is_dir()
