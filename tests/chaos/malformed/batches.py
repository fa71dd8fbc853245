"""Batches of a run: files whose bytes changed, and files of a foreign writer, who gives wrong content right checksums.

Whatever is in `batches/`, it is refused in one line that names the file, or holds nothing that cannot be.
"""

from __future__ import annotations

import io
import random
import zipfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.analysis.audit import verify_history
from pipeline.data.batch import Batch, Completion, DroppedGroup, Group, KeptSets, LogprobContract, Prompt, Sample
from pipeline.data.batch_format import arrays_of, attributes_of, with_digests
from pipeline.data.batch_values import Limits
from pipeline.data.routed_experts import RoutedExperts
from pipeline.data.store import BatchStore
from pipeline.data.zarr_zip import write_zarr_zip
from pipeline.errors import StoreError
from pipeline.schedule import Schedule
from tests.chaos.malformed.mutations import judged, mutated_bytes, mutated_data
from tests.support.files import sealed_zip

COUNT = 2000
IN_MAKE_TEST = 25
VOCABULARY, LONGEST, NUM_EXPERTS = 64, 8, 8
LIMITS = Limits(vocab_size=VOCABULARY, max_response_tokens=LONGEST, num_experts=NUM_EXPERTS)


def prepare() -> None:
    """Makes the good batches."""
    goods()


def attempt(seed: int, folder: Path) -> str:
    """Write a malformed batch, read it as a learner does, and audit it."""
    rng = random.Random(f"batches/{seed}")
    store = BatchStore(folder / "batches", limits=LIMITS)
    store.path(0).write_bytes(mutated_batch(rng))
    found: list[Batch] = []
    verdict = judged(lambda: found.append(store.read(0, None)), StoreError, names=("000000.zarr.zip",))
    if found and (fault := _impossible(found[0])) is not None:
        return fault
    if verdict != "ok":
        return verdict
    sound: list[bool] = []
    audit = judged(
        lambda: sound.append(verify_history(folder, Schedule(kind="sync", steps=1), 1, limits=LIMITS).sound), StoreError
    )
    if not found and sound == [True]:
        return "refused for training, but verify history calls it sound"
    return audit


def mutated_batch(rng: random.Random) -> bytes:
    """A file."""
    good = rng.choice(goods())
    how = rng.random()
    if how < 0.3:
        return mutated_bytes(rng, _file(attributes_of(good), arrays_of(good)))
    if how < 0.5:
        return _file(_attributes(rng, good), arrays_of(good))
    if how < 0.8:
        return _file(attributes_of(good), _arrays(rng, arrays_of(good)))
    return _resealed(rng, _file(attributes_of(good), arrays_of(good)))


@cache
def goods() -> tuple[Batch, ...]:
    """A plain batch, one with kept sets, and one with routed experts."""
    random_numbers = np.random.default_rng(0)

    def sample(number: int, kept: bool, experts: bool) -> Sample:
        tokens = tuple(random_numbers.integers(0, VOCABULARY, 1 + number % LONGEST).tolist())
        rows = np.tile(np.array([[[1, 5]]], np.uint8), (2 + len(tokens), 1, 1))
        one = Completion(
            tokens=np.array(tokens, np.int32),
            logprobs=-random_numbers.random(len(tokens)).astype(np.float32),
            versions=np.zeros(len(tokens), np.int32),
            loss_mask=np.ones(len(tokens), np.bool_),
            finish="stop" if number % 2 else "length",
            engine=number % 3,
            queued_s=0.1,
            generated_s=0.2,
            kept=KeptSets.of([[token] for token in tokens]) if kept else None,
            experts=RoutedExperts(ids=rows, known=np.ones(len(rows), np.bool_)) if experts else None,
        )
        return Sample(completion=one, reward=float(number % 2), reward_parts={"format": 1.0} if number % 3 else {})

    def batch(kept: bool, experts: bool) -> Batch:
        contract = LogprobContract(
            temperature=1.0, top_p=0.9 if kept else 1.0, top_k=-1, tokenizer_sha256="", kept_set=kept
        )
        groups = [
            Group(
                prompt=Prompt(group=group, text="", answer="", tokens=(1, 2), problem=group),
                samples=tuple(sample(4 * group + member, kept, experts) for member in range(4)),
            )
            for group in range(3)
        ]
        return Batch.from_groups(
            0,
            groups,
            contract=contract,
            dropped=[DroppedGroup(group=3, reason="too long")],
            next_group=6,
            open_groups=(4, 5),
            recipe_sha256="",
        )

    return batch(False, False), batch(True, False), batch(False, True)


def _file(attributes: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> bytes:
    """As the store would write it."""
    file = io.BytesIO()
    with suppress(Exception):  # a content that has no digest is given none
        attributes = with_digests(attributes, arrays)
    try:
        write_zarr_zip(file, attributes, arrays)
    except Exception:  # noqa: BLE001 - not every content can be written: then half of a file it is
        file.write(b"PK")
    return file.getvalue()


def _attributes(rng: random.Random, good: Batch) -> dict[str, Any]:
    """Attributes with other values, some of which say that there is very much."""
    attributes = attributes_of(good)
    if rng.random() < 0.4:
        name = rng.choice(("open_groups", "next_group", "dropped", "index", "schema_version"))
        huge: dict[str, tuple[Any, ...]] = {
            "open_groups": ([[4, 10**12]], [[5, 4]], [[4, 5]] * 50, [[-(10**9), 5]], [4], [["4", "5"]]),
            "next_group": (10**12, -1, 6.5, "6", None, 2**70, True),
            "dropped": ([{"group": 10**12, "reason": "x"}], [{}], [{"group": -1, "reason": 1}], {"a": 1}),
            "index": (1, -1, "0", 0.0, False, None),
            "schema_version": (0, 1, 2, 3, 99, "5", None, 5.0, -1),
        }
        return {**attributes, name: rng.choice(huge[name])}
    return dict(mutated_data(rng, attributes)) if rng.random() < 0.9 else {}


_VALUES = (
    float("nan"),
    float("inf"),
    -float("inf"),
    5.0,
    1e-3,
    -1e39,
    -3.4e38,
    -200.0,
    -1.0,
    64,
    2**31 - 1,
    -(2**31),
    255,
)


def _arrays(rng: random.Random, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """One array with a value, a length or a dtype that cannot be; or without it."""
    name = rng.choice(list(arrays))
    array = arrays[name].copy()
    how = rng.choice(("value",) * 6 + ("shorter", "longer", "dtype", "missing", "axes", "sorted"))
    if how == "missing":
        return {other: found for other, found in arrays.items() if other != name}
    if how == "value" and array.size:
        flat = array.reshape(-1)
        with np.errstate(all="ignore"):
            flat[rng.randrange(flat.size)] = np.array(rng.choice(_VALUES)).astype(array.dtype)
    elif how == "shorter":
        array = array[:-1]
    elif how == "longer":
        array = np.concatenate([array, array[-1:]])
    elif how == "dtype":
        with np.errstate(all="ignore"):
            array = array.astype(rng.choice(("float64", "int8", "complex64", "uint64", "bool", "float16")))
    elif how == "axes":
        array = array[None]
    else:
        array = np.sort(array, axis=0)[::-1].copy()
    return {**arrays, name: array}


def _resealed(rng: random.Random, data: bytes) -> bytes:
    """One member changed, under a right checksum of the file."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice([name for name in members if name.endswith("zarr.json")] if rng.random() < 0.7 else list(members))
    if rng.random() < 0.5:
        for number, other in ((b"12", b"1000000000000"), (b"float32", b"float64"), (b'"shape": [', b'"shape": [9, ')):
            if rng.random() < 0.5:
                members[name] = members[name].replace(number, other)
    else:
        members[name] = mutated_bytes(rng, members[name])
    if rng.random() < 0.2:
        members[rng.choice(("../x", "a" * 300, "zarr.json ", name + "/c/9"))] = b"x" * rng.choice((0, 10, 10_000))
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", compression=rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return sealed_zip(memory.getvalue())


def _impossible(batch: Batch) -> str | None:
    """What cannot be in a batch that may be trained on, by rules of this file."""
    with np.errstate(all="ignore"):
        logprobs = batch.rollout_logprobs
        if not np.all(np.isfinite(logprobs) & (logprobs > -1000) & (logprobs <= 1e-4)):
            return "log-probabilities that cannot be were read for training"
        if batch.tokens.min(initial=0) < 0 or batch.tokens.max(initial=0) >= VOCABULARY:
            return "tokens outside of the vocabulary were read for training"
        if batch.response_lengths.min(initial=1) < 1 or batch.response_lengths.max(initial=1) > LONGEST:
            return "a response that is empty or too long was read for training"
        if not np.isfinite(batch.reward).all() or any(np.isinf(part).any() for part in batch.reward_parts.values()):
            return "a reward that is no number was read for training"
        if not np.all(np.isfinite(batch.queued_s) & np.isfinite(batch.generated_s) & (batch.queued_s >= 0)):
            return "seconds that cannot be were read for training"
        if batch.policy_version.min(initial=0) < 0:
            return "a version below 0 was read for training"
        if batch.experts is not None and batch.experts.ids.max(initial=0) >= NUM_EXPERTS:
            return "an expert that there is not was read for training"
    return None
