"""MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from covey.telemetry.trackers.protocol import PROJECT, Start, columns_of

if TYPE_CHECKING:
    from mlflow import MlflowClient

_PARAMS_PER_CALL = 100
_REFUSED = re.compile(r"[^\w\-./: ]")


class MLflow:
    """Sends to an MLflow run; of a table each step is a file of its own."""

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client = client
        self._run_id = run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = [Metric(_REFUSED.sub("_", name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=values)

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        # One growing file would be fetched and sent again, whole, at every table.
        data = {column: [row.get(column) for row in rows] for column in columns_of(rows)}
        self._client.log_table(self._run_id, data, f"{_REFUSED.sub('_', name)}/step-{step:06d}.json")

    def close(self, exit_code: int) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if exit_code == 0 else "FAILED")


def open_tracker(start: Start) -> MLflow:
    """Create a run on the server that the environment names, or in mlruns/ of the run directory."""
    for name, value in (
        ("MLFLOW_DISABLE_TELEMETRY", "true"),
        ("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false"),
        # The one local store that the small client can open; its database needs the full mlflow.
        ("MLFLOW_ALLOW_FILE_STORE", "true"),
    ):
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient
    from mlflow.entities import Param

    uri = None if "MLFLOW_TRACKING_URI" in os.environ else (start.output_dir / "mlruns").absolute().as_uri()
    client = MlflowClient(tracking_uri=uri)
    run = client.create_run(_experiment(client), run_name=start.run_name)
    params = [Param(_REFUSED.sub("_", name), str(value)) for name, value in start.config.items()]
    for first in range(0, len(params), _PARAMS_PER_CALL):
        client.log_batch(run.info.run_id, params=params[first : first + _PARAMS_PER_CALL])
    return MLflow(client, run.info.run_id)


def _experiment(client: MlflowClient) -> str:
    if identifier := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return identifier
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
    experiment = client.get_experiment_by_name(name)
    return experiment.experiment_id if experiment is not None else client.create_experiment(name)
