"""Save and load the learner's state in Megatron's distributed format, which any parallel layout can load.

A checkpoint also loads with the other kind of layers and in another precision, except float32 state into bfloat16 or
FP8. `save_weights` and `load_weights` handle weights alone.

The format's files are pickles; only numbers and tensors are let through. The index is searched for foreign classes
before Megatron loads it. `common.pt`, tensors and the state of random generators are read with `weights_only=True`;
this module reads the generators' state itself, because Megatron would unpickle any object.

In order: `begin_save`, `load`; weights alone; damage; ShardSave; the optimizer state as each rank's share of boxes.
"""

from __future__ import annotations

import math
import pickle
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import convert_cuda_rng_state
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_bridge.checkpoint.dcp import CheckpointIndex, StoredTensor
from megatron_bridge.parallel.layout import Layout
from megatron_bridge.step.host_weights import PinnedMemory
from pipeline import spans
from pipeline.background import in_background, is_over
from pipeline.data.checksums import Fingerprint, fingerprints
from pipeline.data.files import machine_failure
from pipeline.errors import CorruptCheckpointError, StoreError
from precision.text import one_line

_EXTRA = "._extra_state"
"""A part of names that hold no weights; TE's grouped linears append a number."""
_RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable"}


def begin_save(
    directory: Path,
    model: Sequence[Any],
    optimizer: Any,
    *,
    step: int,
    layout: Layout,
    gather: Callable[[Callable[[], Any]], list[Any]],
    memory: PinnedMemory,
) -> ShardSave:
    """Begin to save weights, optimizer, step and RNG state, as they are now, into an empty directory. The copy takes
    all of `memory`, until the save ends. Collective."""
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    # Megatron-Core 0.16.1 saves only existing state and refuses torch's Adam without any: an optimizer that has taken
    # no step gets the state that its first step begins with.
    for part in optimizer.chained_optimizers:
        if part.optimizer.state:
            continue
        part.init_state_fn(part.optimizer, part.config)
        if isinstance(part.optimizer, torch.optim.AdamW):
            for moments in part.optimizer.state.values():
                moments["step"] = torch.tensor(0.0)
        else:
            for group in part.optimizer.param_groups:
                group["step"] = 0
    state = _sharded_state(model, optimizer)
    state["learner"] = {"step": step, "layout": asdict(layout), "device": _device()}
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    held = {name: convert_cuda_rng_state(value).clone() for name, value in tracker.items()}
    rng = {"torch": torch.get_rng_state(), "tracker": held}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    state["rng"] = _rng_object(rng)
    write_in_threads()
    in_training = storages_of(state)
    request = dist_checkpointing.save(state, str(directory), async_sharded_save=True)
    return ShardSave(request, gather, in_training=in_training, memory=memory)


def load(directory: Path, model: Sequence[Any], optimizer: Any, *, layout: Layout) -> int:
    """Restore model, optimizer and, if layout and kind of device are the saved ones, RNG; return the step. Collective.
    Raises CorruptCheckpointError for a damaged checkpoint, but not for errors of other ranks or of the machine."""
    index = CheckpointIndex(directory)  # before Megatron, which unpickles the index unchecked
    for part in _distributed_parts(optimizer):
        # Loading fills the optimizer's tensors, but Adam creates its own only in the first step.
        part._init_optimizer_states_with_dummy_values()
    state = _sharded_state(model, optimizer, index.tensors)
    try:
        saved = dist_checkpointing.load_common_state_dict(str(directory))["learner"]
        step = int(saved["step"])
        same_ranks = saved["layout"] == asdict(layout) and saved.get("device", _device()) == _device()
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle raises errors of any type
        if machine_failure(error) is not None:
            raise
        raise CorruptCheckpointError(
            f"{directory} is not a complete checkpoint (common.pt: {type(error).__name__}: {one_line(error, 300)}); "
            "use an older one"
        ) from error
    rng: dict[str, Any] | None = None
    if same_ranks:
        match index.read_object(_rng_object(None).unique_key):
            case [{"torch": torch.Tensor(), "tracker": dict()} as rng]:  # Megatron wraps every object in a list
                pass
            case _:
                raise CorruptCheckpointError(
                    f"{directory} holds no state of random generators where it should; use another"
                )
    with damage_as(lambda why: f"{directory} is not a complete checkpoint ({why}); use an older one"):
        loaded = dist_checkpointing.load(state, str(directory))
    for key, chunk in zip(chunk_keys(model), model, strict=True):
        fill(chunk.module, loaded[key])
    _place_steps(optimizer, loaded["optimizer"])
    optimizer.load_state_dict(loaded["optimizer"])
    # Megatron-Core 0.16.1 loads one tensor `step` for all parameters, which torch.optim.AdamW would advance once for
    # each. It gives groups the float that torch saved, but TE's kernel needs an int.
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            if "step" in group:
                group["step"] = int(group["step"])
        for moments in part.optimizer.state.values():
            if isinstance(moments.get("step"), torch.Tensor):
                moments["step"] = moments["step"].clone()
    if rng is not None:
        torch.set_rng_state(rng["torch"])
        tracker = tensor_parallel.get_cuda_rng_tracker()
        graphs = any(isinstance(state, torch.Generator) for state in tracker.get_states().values())
        tracker.set_states({name: convert_cuda_rng_state(state, graphs) for name, state in rng["tracker"].items()})
        if "cuda" in rng:
            torch.cuda.set_rng_state(rng["cuda"])
    return step


def _distributed_parts(optimizer: Any) -> list[Any]:
    return [part for part in optimizer.chained_optimizers if hasattr(part, "_init_optimizer_states_with_dummy_values")]


def _place_steps(optimizer: Any, loaded: dict[Any, Any]) -> None:
    """Move the loaded step to where the optimizer reads it: torch's Adam keeps a step for each parameter, TE's for each
    group. Without the distributed optimizer, Megatron-Core 0.16.1 loads it to where the saving optimizer kept it."""
    parts = optimizer.chained_optimizers
    for number, part in enumerate(parts):
        if part in _distributed_parts(optimizer):
            continue
        state = loaded if len(parts) == 1 else loaded[number]
        state = state.get("optimizer", state)  # a float32 optimizer's state is Adam's alone
        steps = [group.pop("step") for group in state["param_groups"] if "step" in group]
        step = state["state"].pop("common_step", next(iter(steps), 0))  # Megatron leaves out a 0
        if isinstance(part.optimizer, torch.optim.AdamW):
            state["state"]["common_step"] = torch.tensor(float(step))
        else:
            for group in state["param_groups"]:
                group["step"] = int(step)


def _sharded_state(
    model: Sequence[Any], optimizer: Any, stored: Mapping[str, StoredTensor] | None = None
) -> dict[str, Any]:
    """Return the state to save or, with a checkpoint's `stored` tensors, the state to fill from the checkpoint."""
    weights = sharded_weights([chunk.module for chunk in model], stored)
    share_optimizer_state()
    metadata = {"metadata": _RESHARDABLE} if _distributed_parts(optimizer) else {}
    named = dict(weights) if len(model) > 1 else weights["model"]
    state = optimizer.sharded_state_dict(named, is_loading=stored is not None, **metadata)
    for part in [state] if len(optimizer.chained_optimizers) == 1 else state.values():
        for group in part.get("optimizer", part).get("param_groups", ()):
            for key in [key for key, value in group.items() if isinstance(value, type)]:
                del group[key]  # Megatron's offloading optimizer names its classes, which no safe load lets through
    return {**weights, "optimizer": state}


def _device() -> str:
    """Return the kind of device in use. States of random generators fit only one kind."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _rng_object(data: dict[str, Any] | None) -> ShardedObject:
    """Return an object with one part for each rank: generators differ over tensor, pipeline and data parallel ranks."""
    return ShardedObject("rng", data, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


def save_weights(directory: Path, chunks: Sequence[Any]) -> None:
    """Write the weights of the model chunks (not wrapped in DDP) into an empty directory. Collective."""
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    write_in_threads()
    dist_checkpointing.save(sharded_weights(chunks), str(directory))


def load_weights(directory: Path, chunks: Sequence[Any]) -> None:
    """Fill the model chunks with a checkpoint's weights, cast to their dtype. Collective."""
    index = CheckpointIndex(directory)  # before Megatron, which unpickles the index unchecked
    with damage_as(
        lambda why: (
            f"{directory} does not hold this model's weights ({why}); look at it with `evenkeel convert inspect`"
        )
    ):
        loaded = dist_checkpointing.load(sharded_weights(chunks, index.tensors), str(directory))
    with torch.no_grad():
        for key, chunk in zip(chunk_keys(chunks), chunks, strict=True):
            fill(chunk, loaded[key])


def sharded_weights(
    chunks: Sequence[Any], stored: Mapping[str, StoredTensor] | None = None
) -> dict[str, dict[str, Any]]:
    """Map chunk key → parameter name → entry of a new checkpoint or of the checkpoint that holds `stored`."""
    found = {}
    for key, chunk in zip(chunk_keys(chunks), chunks, strict=True):
        found[key] = {name: entry for name, entry in chunk.sharded_state_dict().items() if _EXTRA not in name}
        for entry in found[key].values():
            if stored is None or not isinstance(entry, ShardedTensor) or entry.key in stored:
                continue
            for own, other in (_MIXTURE_NORMS, _MIXTURE_NORMS[::-1]):
                renamed = entry.key.removesuffix(own) + other
                if entry.key.endswith(own) and renamed in stored:
                    entry.key = renamed
                    break
    return found


def fill(chunk: Any, state: Mapping[str, Any]) -> None:
    """Copy loaded values into a chunk without DDP wrapper. Raises CorruptCheckpointError for wrong names."""
    missing, unexpected = chunk.load_state_dict(state, strict=False)
    wrong = [name for name in (*missing, *unexpected) if _EXTRA not in name]
    if wrong:
        raise CorruptCheckpointError(
            f"{len(wrong)} names of the checkpoint's weights are not those of this model, the first {wrong[0]}; "
            "give the checkpoint of this model"
        )


_MIXTURE_NORMS = ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
"""The name of the norm before a mixture in checkpoints, for Megatron's own layers and for TE's. Other names agree."""


def chunk_keys(chunks: Sequence[Any]) -> list[str]:
    """Return Megatron's names of a rank's chunks, for this process only: checkpoints name tensors by global layer."""
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]


_OF_DAMAGE = (CheckpointingException, OSError, KeyError, EOFError, pickle.UnpicklingError)
_SAID_OF_DAMAGE = ("PytorchStreamReader", "corrupt", "size mismatch")
"""Parts of the messages of RuntimeErrors that torch.load or load_state_dict raise for damage."""
_SHORT = (MemoryError, torch.OutOfMemoryError)


@contextmanager
def damage_as(message: Callable[[str], str]) -> Iterator[None]:
    """Raise CorruptCheckpointError for damage met while a checkpoint is loaded; `message` gets the reason."""
    try:
        yield
    except CheckpointException as error:  # a BaseException that holds each rank's read errors
        met = [failure for failure, _ in error.failures.values()]
        if blameless := [one for one in met if _is_blameless(one)]:
            raise blameless[0] from error
        raise CorruptCheckpointError(message(one_line(met[0], 300))) from error
    except _OF_DAMAGE as error:
        if _is_blameless(error):
            raise
        raise CorruptCheckpointError(message(one_line(error, 300))) from error
    except RuntimeError as error:
        if not any(said in str(error) for said in _SAID_OF_DAMAGE):
            raise
        raise CorruptCheckpointError(message(one_line(error, 300))) from error


def _is_blameless(error: BaseException) -> bool:
    """Return whether the machine caused the error, not the stored data."""
    return isinstance(error, _SHORT) or "CUDA error" in str(error) or machine_failure(error) is not None


class ShardSave:
    """One rank's part of a save that continues while the learner trains.

        main thread   plan ─▶ copy to host memory ─▶ train ─▶ train ─▶ "are all written?" ─▶ index of the shards
        writer thread                             └─▶ write, fsync and hash this rank's shards ─┘

    Megatron-Core prepares the save as a request: a function that writes, and functions that complete the folder once
    all ranks have written. The copy takes as much host memory as the rank's share; on a GPU that stays pinned for the
    next save, and the copies are only queued before training goes on.
    """

    def __init__(
        self,
        request: Any,
        gather: Callable[[Callable[[], Any]], list[Any]],
        *,
        in_training: frozenset[int],
        memory: PinnedMemory,
    ) -> None:
        """`request` is Megatron-Core's AsyncRequest. `gather` returns every rank's result, a JSON value, and is
        collective. `in_training` are the `storages_of` the state that training continues with. The copy takes all of
        `memory`."""
        self.hashed: dict[str, Fingerprint] = {}
        """Files of the folder by name, hashed and made durable by the ranks that wrote them; empty until the end."""
        self._gather = gather
        self._complete = list(request.finalize_fns)
        arguments = list(request.async_fn_args)
        files = {key: Path(path) for path, key, _ in arguments[1]} if arguments else {}
        copied = None
        if request.preload_fn is not None:
            # Megatron's own `preload_fn` has torch pin each tensor, rounded up to a power of two: possibly twice the
            # checkpoint's size.
            memory.reuse()
            arguments[1] = []
            for path, key, (texts, tensors) in request.async_fn_args[1]:
                copies = []
                for item, tensor in tensors:
                    # On the host, only a tensor in training needs a copy; a slice of a larger tensor is one already.
                    at_rest = tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() not in in_training
                    copies.append((item, tensor if at_rest else memory.hold(tensor)))
                arguments[1].append((path, key, (texts, copies)))
            if memory.pinned:
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record()
            for _, _, (_, tensors) in request.async_fn_args[1]:
                tensors.clear()  # Megatron's writer keeps them until all ranks have written

        def write() -> dict[str, Any]:
            if request.async_fn is None:  # other ranks write all that this rank holds
                return {}
            with spans.span("save", "write"):
                if copied is not None:
                    copied.synchronize()
                request.async_fn(*arguments, **request.async_fn_kwargs)
                arguments.clear()  # frees the copy
            found = dict(zip(files, fingerprints(list(files.values())), strict=True))
            if missing := [name for name, one in found.items() if one is None]:
                raise StoreError(f"{files[missing[0]]} vanished while it was saved; see who removes it")
            return found

        self._written = in_background(write, "shards")

    def advance(self, wait_s: float) -> bool:
        """Return whether everything is written; each rank waits at most `wait_s` for its share. Collective; not to be
        called again after it returned True. Raises an error of any rank on every rank."""
        shares = self._gather(lambda: self._written.result() if is_over(self._written, wait_s) else None)
        if None in shares:
            return False
        self.hashed = {name: Fingerprint(*found) for share in shares for name, found in share.items()}
        for complete in self._complete:
            complete()
        return True


def storages_of(state: Any) -> frozenset[int]:
    """Return the storage addresses of the tensors in a sharded state."""
    data = (entry.data for entry in nested_values(state) if isinstance(entry, ShardedTensor | ShardedTensorFactory))
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in data)


_Writer = filesystem_async.FileSystemWriterAsync


def write_in_threads() -> None:
    """Keep this process's saves from starting processes: Megatron forks writers, and a manager for blocking saves."""
    filesystem_async._results_queue = queue.SimpleQueue()
    _Writer.write_preloaded_data_multiproc = staticmethod(_write_all)


def _write_all(
    transforms: Sequence[Any], use_msc: bool, _rank: int, buckets: Sequence[Any], results: queue.SimpleQueue[Any]
) -> None:
    """Replace Megatron's function of these arguments: write the buckets in threads. `results` gets the buckets' results
    by number. Raises the first writer's error, which Megatron would lose on its way to rank 0."""
    options = {"use_msc": True} if use_msc else {}

    def write(number: int) -> tuple[int, Any]:
        outcome, waiting = queue.SimpleQueue[tuple[int, Any]](), queue.Queue[int]()
        waiting.put(number)  # a writer takes one entry when it is done
        _Writer.write_preloaded_data(transforms, number, buckets[number], outcome, waiting, True, **options)
        return outcome.get()

    with ThreadPoolExecutor(max(1, len(buckets)), thread_name_prefix="shard-writer") as threads:
        written = dict(threads.map(write, range(len(buckets))))
    for found in written.values():
        if isinstance(found, Exception):
            raise found
    results.put(written)


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The begin and the size of a box in a tensor, by dimension."""


def share_optimizer_state() -> None:
    """Make the fully reshardable format of this process hold each rank's own share."""
    DistributedOptimizer.sharded_param_state_fully_reshardable = _own_share
    DistributedOptimizer.load_parameter_state_from_fully_reshardable = _take_share


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the elements from `start` to `stop` of a tensor of this shape, in row-major order, as consecutive boxes."""
    if start >= stop:
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # range of the whole rows
    if first > last:  # all in one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    for begin, size in boxes_of_range(shape[1:], start, stop):
        yield (row, *begin), (1, *size)


def _own_share(
    self: Any,
    model_sharded_state_dict: Any,
    is_loading: bool = False,
    metadata: Any = None,  # noqa: ARG001
) -> dict[int, dict[str, list[ShardedTensor]]]:
    """Replace Megatron's method: map parameter number → kind of state → boxes of this rank's range, in order."""
    kinds = ShardedTensor | ShardedTensorFactory
    places = {entry.data: entry for entry in nested_values(model_sharded_state_dict) if isinstance(entry, kinds)}
    share = {}
    for number, (parameter, start, stop) in enumerate(_held_ranges(self)):
        parts = _parts(places[parameter])
        share[number] = {
            kind: [
                box
                for part, offset in parts
                for box in _sharded_boxes(kind, part, offset, flat, start, stop, with_data=not is_loading)
            ]
            for kind, flat in _state_tensors(self, parameter).items()
        }
    return share


@torch.no_grad()
def _take_share(self: Any, loaded: dict[int, dict[str, list[Tensor]]]) -> None:
    """Replace Megatron's method: copy the boxes loaded for `_own_share` into the optimizer."""
    aware = self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    for number, (parameter, _, _) in enumerate(_held_ranges(self)):
        for kind, flat in _state_tensors(self, parameter).items():
            taken = torch.cat([box.flatten() for box in loaded[number][kind]])
            if aware:  # what is held may be a copy, in another scale
                self._set_main_param_and_optimizer_states(parameter, {kind: taken})
            else:
                flat.copy_(taken)
    if isinstance(self.optimizer, HybridDeviceOptimizer):
        self.optimizer._sync_hdo_state_to_sub_optimizers()


def _held_ranges(optimizer: Any) -> Iterator[tuple[Tensor, int, int]]:
    """Yield each parameter whose state this rank holds (in part), with the range of its flattened elements."""
    for buckets in optimizer.gbuf_ranges:
        for bucket in (one for of_dtype in buckets.values() for one in of_dtype):
            for parameter, ranges in bucket["param_map"].items():
                yield parameter, ranges["param"].start, ranges["param"].end


def _state_tensors(optimizer: Any, parameter: Tensor) -> dict[str, Tensor]:
    """Return the main copy and the moments [elements of the range]. Groups hold the steps (see `_place_steps`)."""
    found: dict[str, Tensor] = optimizer._get_main_param_and_optimizer_states(parameter)
    return {kind: tensor.detach() for kind, tensor in found.items() if kind != "step"}


def _parts(entry: ShardedTensor | ShardedTensorFactory) -> list[tuple[ShardedTensor, int]]:
    """Return the parts of a parameter that lie apart in a checkpoint, such as gate and up of an MLP, each with its
    first element's place in the parameter. Raises ValueError for a part that is not contiguous in the parameter."""
    if isinstance(entry, ShardedTensor):
        return [(entry, 0)]
    whole, parts = entry.data, list(nested_values(entry.build()))
    for part in parts:
        shared = part.data.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        if not (shared and part.data.is_contiguous()):
            raise ValueError(f"{part.key} is stored in another order than the optimizer's; its state cannot be shared")
    placed = [(part, part.data.storage_offset() - whole.storage_offset()) for part in parts]
    return sorted(placed, key=lambda one: one[1])


def _sharded_boxes(
    kind: str, part: ShardedTensor, offset: int, flat: Tensor, start: int, stop: int, *, with_data: bool
) -> Iterator[ShardedTensor]:
    """Yield the boxes of `part`, which begins at element `offset`, within a parameter's range and its state `flat`."""
    at = max(start, offset)
    shape = tuple(part.local_shape)
    more = (0,) * part.prepend_axis_num
    for begin, size in boxes_of_range(shape, at - offset, min(stop - offset, math.prod(shape))):
        number = math.prod(size)
        size = (*(1 for _ in more), *size)
        yield ShardedTensor(
            key=f"optimizer.state.{kind}.{part.key}",
            data=flat[at - start : at - start + number].view(size) if with_data else None,
            dtype=flat.dtype,
            local_shape=size,
            global_shape=part.global_shape,
            global_offset=tuple(map(sum, zip(part.global_offset, (*more, *begin), strict=True))),
            axis_fragmentations=None,  # the boxes form no regular grid
            replica_id=(*part.replica_id[:2], 0),  # no two data parallel ranks have the same elements
            allow_shape_mismatch=part.allow_shape_mismatch,
        )
        at += number
