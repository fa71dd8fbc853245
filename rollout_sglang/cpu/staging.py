"""Load a CPU engine's next weights while it serves: into second parameters, which are then exchanged with its own.

    scheduler     stage … stage ─▶ done? …       pause ─▶ update_weights_from_disk: exchange ─▶ checksum
    own thread    receive ─▶ SGLang's loaders ─▶ SGLang's checksums of the second parameters

SGLang's calls that change weights wait for every request to end, or stop the engine: its one thread decodes nothing
while it receives, loads and hashes. Staging is an action of `POST /weights_checker`, which does neither. Its text is
`stage ` and JSON, and a separate thread does the work. Staged weights are identified by their folder, which may not
exist yet. When the engine is then told to load that folder, it computes with the hashed tensors, to which nothing was
written in between. So the next checksum request returns the hash already computed, unless SGLang began another load
meanwhile. Every later checksum is computed.

Staging takes the memory of the weights once more. GPU servers do not import this module; releases of SGLang that keep
the methods elsewhere refuse the action. Weights are then loaded while the engine is paused.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollout_sglang.protocol import STAGE

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
Job = Callable[[], None]


def register_hooks() -> None:
    """Add the action, and intercept every order to load a folder. Call once per process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_RUNNER}.check_weights", _check_weights, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.update_weights_from_disk", _from_disk, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.begin_weight_update", _forget_checksums, HookType.BEFORE)


def _check_weights(original: Callable[..., Any], runner: Any, action: str, *args: Any, **options: Any) -> Any:
    staging: Staging | None = getattr(runner, "even_keel_staging", None)
    if not action.startswith(STAGE):
        fresh = staging.take_checksums() if staging is not None and action == "checksum" else None
        return original(runner, action, *args, **options) if fresh is None else fresh
    order = json.loads(action.removeprefix(STAGE))
    if staging is None or order["do"] in ("begin", "folder"):
        shadow = None if staging is None else staging.stop()
        staging = runner.even_keel_staging = Staging(runner, shadow)
    state = staging.obey(order)
    placement = runner._weight_checker._parallelism_info(role=options["role"])
    return dict(checksums=state, per_gpu_checksum="", parallelism_info=placement.model_dump())


def _from_disk(original: Callable[..., Any], updater: Any, model_path: str, *args: Any, **options: Any) -> Any:
    staging: Staging | None = getattr(updater.get_model_runner(), "even_keel_staging", None)
    if staging is not None and staging.adopt(model_path):
        return True, "Succeeded to update model weights: they were staged."
    _forget_checksums(updater)
    return original(updater, model_path, *args, **options)


def _forget_checksums(updater: Any, *_: Any, **__: Any) -> None:
    """Drop the checksums: SGLang is about to write to the engine's weights."""
    staging: Staging | None = getattr(updater.get_model_runner(), "even_keel_staging", None)
    if staging is not None:
        staging.take_checksums()


class Staging:
    """The staged weights of one update. Only the staging thread's work runs outside the scheduler's thread."""

    def __init__(self, runner: Any, shadow: Any) -> None:
        """`shadow` is a model of `shadow_of` that no thread writes to any more, or None. Raises RuntimeError where
        SGLang would load folders without calling `adopt`."""
        found = type(runner.weight_updater)
        if f"{found.__module__}.{found.__qualname__}" != _UPDATER:
            raise RuntimeError(f"weights are loaded by {found}, expected {_UPDATER}: they cannot be staged")
        self._runner = runner
        self._shadow = shadow
        self._updater: Any = None
        self._folder: str | None = None
        self._asked = self._done = 0
        self._failure = ""
        self._checksums: dict[str, Any] | None = None
        self._adopted = False
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="staging", daemon=True)
        self._thread.start()

    def obey(self, order: dict[str, Any]) -> dict[str, str]:
        """Carry out or queue an order. Return `pending`, the number of queued orders; `failure`, the reason why staging
        has ended, if any; and for "member" whether the engine is in that process group."""
        jobs: dict[str, Callable[[], None]] = {
            "folder": lambda: self._finish(order["folder"], _tensors(Path(order["folder"]))),
            "group": lambda: self._load(self._received(order)),
            "bucket": lambda: self._open(order["bucket"]),
            "finish": lambda: self._finish(order["folder"]),
        }
        if order["do"] in jobs:
            self._asked += 1
            self._jobs.put(jobs[order["do"]])
        elif order["do"] not in ("begin", "wait", "member"):
            raise ValueError(f"staging knows no order {order['do']}")
        groups = self._runner.weight_updater._model_update_group
        member = {"member": str(order["group"] in groups)} if order["do"] == "member" else {}
        return {"pending": str(self._asked - self._done), "failure": self._failure} | member

    def adopt(self, folder: str) -> bool:
        """Make the staged weights of the folder the engine's. Return False when they are not staged."""
        if self._adopted or self._failure or self._folder != folder or self._asked != self._done:
            return False
        exchange(self._runner.model, self._shadow)
        self._adopted = True
        return True

    def take_checksums(self) -> dict[str, Any] | None:
        """Return the checksums of the adopted weights, once; None when they were taken or nothing was adopted."""
        found, self._checksums = (self._checksums, None) if self._adopted else (None, self._checksums)
        return found

    def stop(self) -> Any:
        """Start no more work. Return the second model for the next update; None while the thread may still write it."""
        self._failure = self._failure or "another update was begun"
        self._checksums = None
        self._jobs.put(None)
        self._thread.join(0.01)
        return None if self._thread.is_alive() else self._shadow

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if not self._failure:
                    if self._updater is None:
                        if self._shadow is None:
                            self._shadow = shadow_of(self._runner.model)
                        self._updater = dataclasses.replace(self._runner.weight_updater, get_model=lambda: self._shadow)
                        self._updater.begin_weight_update()
                    job()
            except Exception as error:  # noqa: BLE001 (reported to the waiting sender)
                self._failure = f"{type(error).__name__}: {error}"
            self._done += 1

    def _load(self, tensors: Any) -> None:
        success, message = self._updater.load_weights_from_distributed(tensors)
        if not success:
            raise RuntimeError(message)

    def _received(self, order: dict[str, Any]) -> Any:
        return self._updater.receive_weights_from_distributed(
            names=order["names"],
            dtypes=order["dtypes"],
            shapes=order["shapes"],
            group_name=order["group"],
            load_format="flattened_bucket",
        )

    def _open(self, bucket: str) -> None:
        from sglang.srt.utils import MultiprocessingSerializer

        opened = MultiprocessingSerializer.deserialize(bucket)
        self._updater.update_weights_from_tensor(named_tensors=opened, load_format="flattened_bucket")

    def _finish(self, folder: str, tensors: Any = None) -> None:
        if tensors is not None:
            self._load(tensors)
        self._updater.end_weight_update(run_post_load=False)
        checker = copy.copy(self._runner._weight_checker)
        checker._get_model = lambda: self._shadow
        self._checksums = checker.handle(action="checksum", role="target")
        self._folder = folder


def shadow_of(model: nn.Module) -> Any:
    """Return the same modules with separate parameters, for SGLang's loaders to write to; buffers are shared with
    `model`. Loaders are methods of `model`'s modules, but write to the parameter that they are given."""
    parameters: dict[int, nn.Parameter] = {}
    modules: dict[int, nn.Module] = {}

    def second(parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in parameters:
            data = parameter.data.clone()  # loaders do not write the rows that pad a vocabulary
            twin = torch.Tensor._make_subclass(type(parameter), data, parameter.requires_grad)
            twin.__dict__.update(parameter.__dict__)
            parameters[id(parameter)] = twin
        return parameters[id(parameter)]

    def shadowed(module: nn.Module) -> nn.Module:
        if id(module) not in modules:
            twin = modules[id(module)] = copy.copy(module)
            twin._parameters = {k: None if p is None else second(p) for k, p in module._parameters.items()}
            twin._modules = {k: None if m is None else shadowed(m) for k, m in module._modules.items()}
        return modules[id(module)]

    return shadowed(model)


@torch.inference_mode(mode=False)
def exchange(model: nn.Module, shadow: nn.Module) -> None:
    """Exchange the parameters of both models, and the tensors that layers derived from them. No byte is copied."""
    for (_, own), (_, other) in zip(model.named_parameters(), shadow.named_parameters(), strict=True):
        own.data, other.data = other.data, own.data
    for own_module, other_module in zip(model.modules(), shadow.modules(), strict=True):
        derived = [name for name, value in vars(other_module).items() if isinstance(value, Tensor)]
        for name in derived:
            vars(own_module)[name], vars(other_module)[name] = vars(other_module)[name], vars(own_module)[name]


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                yield name, opened.get_tensor(name)
