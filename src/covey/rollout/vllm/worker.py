"""What vLLM's workers do for a publish: a class that vLLM itself adds to each of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.rollout.server.group import GroupPlace, device_name, first_line
from covey.rollout.vllm import library
from covey.rollout.vllm.names import adapter_parts_of, layer_of, parts_of
from covey.rollout.vllm.workers import WorkerGroup
from covey.texts import tr

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FILES = "*.safetensors"


class Publishing:
    """Methods of a worker, called by `LLM.collective_rpc`; the other attributes are vLLM's."""

    model_runner: Any
    rank: int
    device: torch.device
    _covey_group: WorkerGroup | None = None

    def covey_load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the weights of a new version, one tensor at a time, where the worker is in this process."""
        failures: list[Exception] = []
        self.model_runner.reload_weights(weights_iterator=_until_failure(weights, failures))
        self._pack_again()
        if failures:
            raise failures[0]

    def covey_load_files(self, directory: str) -> None:
        """Take the weights of a new version from the safetensors files of a directory."""
        self.covey_load(_stored(Path(directory)))

    def covey_device(self) -> str:
        """Where this worker computes."""
        return device_name(self.device)

    def covey_join_group(self, place: Mapping[str, Any], num_workers: int) -> str:
        """Be a rank of a process group with a run; returns what it failed with."""
        self.covey_leave_group()
        try:
            at = GroupPlace(**place)
            self._covey_group = WorkerGroup(at, self.rank + 1, num_workers + 1, self.device)
        except (RuntimeError, TimeoutError) as error:
            return first_line(error)
        return ""

    def covey_leave_group(self) -> None:
        """Be in none."""
        if self._covey_group is not None:
            self._covey_group.leave()
            self._covey_group = None

    def covey_load_group(self, load: int) -> str:
        """Take the weights of a new version from the group; returns what it failed with."""
        if self._covey_group is None:
            return tr("it is in no process group")
        try:
            self.covey_load(self._covey_group.received(load))
        except Exception as error:  # noqa: BLE001 - said by the engine, whose workers go on
            return first_line(error)
        return ""

    def covey_parts(self, sent: Sequence[str] = ()) -> dict[str, list[int]]:
        """Return the part of each tensor that this worker holds: a `Part` as a list, by transformers' name.
        `sent` names the tensors that were published."""
        model = self.model_runner.get_model()
        parts = parts_of(model, library.fused_names(model), library.held_names(model, sent))
        return {name: list(part) for name, part in parts.items()}

    def covey_normalizes(self) -> bool:
        """Whether this worker normalizes the pixels that it is given."""
        return library.normalizes_pixels(self.model_runner.get_model())

    def covey_adapter_parts(self, number: int, rank: int, sent: Sequence[str] = ()) -> dict[str, list[int]]:
        """What this worker computes with of the adapter of a number, as `covey_parts`, of which the matrices
        were published that are in `sent`; nothing where it has none of that number."""
        manager = self.model_runner.lora_manager._adapter_manager
        if number not in manager.lora_index_to_id:
            return {}
        slot = manager.lora_index_to_id.index(number)
        # Layers are mapped as their weights are.
        weights = {f"{layer_of(name)}.weight" for name in sent}
        names = library.held_names(self.model_runner.get_model(), weights)
        layers = {n.removesuffix(".weight"): own.removesuffix(".weight") for n, own in names.items()}
        parts = adapter_parts_of(manager.modules, manager.packed_modules, slot, rank, layers)
        return {name: list(part) for name, part in parts.items()}

    def _pack_again(self) -> None:
        """vLLM's CPU build multiplies with packed copies. It makes them anew for weights that it has dropped,
        and forgets that of an embedding which is the head as well."""
        for module in self.model_runner.get_model().modules():
            weight = getattr(module, "weight", None)
            if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
                library.pack_again(module)


def _until_failure(
    weights: Iterable[tuple[str, Tensor]], failures: list[Exception]
) -> Iterator[tuple[str, Tensor]]:
    """Weights until they break off: vLLM puts every layer together again at their end alone, and a publish
    that follows has to find whole ones."""
    try:
        yield from weights
    except Exception as error:  # noqa: BLE001  raised by whoever has asked for the weights
        failures.append(error)


def _stored(directory: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for path in sorted(directory.glob(FILES)):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                yield name, file.get_tensor(name)
