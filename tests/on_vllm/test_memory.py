"""What two ranks that are one vLLM hold of a model of 400 MB that is split over them: the forecast in each
phase, and no whole model beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support import held
from support.large_model import large_model_bytes, run_ranks, save_large

pytestmark = [pytest.mark.vllm, pytest.mark.multi]

RUNS = {"full": "", "lora": "--tuner_type lora"}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("held")
    words = (
        f"train --model {save_large(folder / 'model')} --dataset quickstart --guards false "
        f"--reward_funcs {held.__file__}:spread --num_generations 4 --per_device_train_batch_size 2 "
        "--max_completion_length 6 --max_steps 2 --kernels torch --ignore_memory_forecast true "
        "--fsdp full_shard --use_vllm true --vllm_mode colocate --vllm_tensor_parallel_size 2 "
        "--vllm_enforce_eager true"
    )
    runs = {
        name: [*words.split(), *more.split(), "--output_dir", str(folder / f"run-{name}")]
        for name, more in RUNS.items()
    }
    return run_ranks(Path(__file__).with_name("held_program.py"), runs, folder, 2)


@pytest.mark.parametrize("name", RUNS)
def test_the_forecast_is_what_is_held(name: str, ranks: list[dict[str, Any]]) -> None:
    """Within a fifth, and with a whole model more it would not be, while the weights are brought to vLLM."""
    for told in ranks:
        forecast, measured = told[name]["forecast"], told[name]["measured"]
        assert measured.keys() >= {"load", "rollout", "publish", "update"}
        for phase in forecast.keys() & measured.keys():
            planned, found = sum(forecast[phase].values()), measured[phase][0]
            assert 0.8 <= planned / found <= 1.2, (phase, forecast[phase], found)
        published = sum(forecast["publish"].values())
        assert published / (measured["publish"][0] + large_model_bytes()[0]) < 0.8
