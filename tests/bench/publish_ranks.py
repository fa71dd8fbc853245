"""The learner of tests.bench.publish: publishes by each channel in turn, copies as many bytes, writes bench.json."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from launch.build.learner import build_channel, build_learner
from launch.run.processes import run_child
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.weight_sync.streaming import StreamedChannel
from megatron_bridge.weight_sync.transport import Bucket, pack
from pipeline.child_process import die_with_parent
from pipeline.data.run_directory import RunDirectory
from pipeline.ports.weights import WeightChannel
from tests.bench.loopback import Loopback

CHANNELS = ("disk", "broadcast", "ipc")


def measure(run: RunDirectory, rounds: int) -> None:
    """bench.json: for each channel, and for `loopback`, one object of numbers a round."""
    recipe = run.recipe()
    learner = build_learner(recipe)
    channels: dict[str, WeightChannel] = {}
    for name in CHANNELS:
        weights = recipe.weights.model_copy(update=dict(channel=name))
        channels[name] = build_channel(run, recipe.model_copy(update=dict(weights=weights)), learner)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in (*CHANNELS, "loopback")}
    version, sent = 0, counted_buckets(channels["broadcast"])
    with Loopback() as loopback:
        for _ in range(rounds):
            for name, channel in channels.items():
                version += 1
                found[name].append(publish(run, learner, channel, version))
                version += 1
                found[name][-1] |= publish_beside(learner, channel, version)
            payload = bytearray(int(found["broadcast"][-1]["bytes"]))
            found["loopback"].append(dict(bytes=float(len(payload)), copy_s=loopback.copy(payload)))
    buckets = len(sent) // (2 * rounds)
    asked_s = asking(channels["broadcast"], learner.model_config.hidden_size, rounds, buckets)
    found["broadcast"] = [one | dict(ask_s=seconds) for one, seconds in zip(found["broadcast"], asked_s, strict=True)]
    for channel in channels.values():
        channel.close()
    (run.path / "bench.json").write_text(json.dumps(found))


def publish(run: RunDirectory, learner: MegatronLearner, channel: WeightChannel, version: int) -> dict[str, float]:
    """What the channel says; bytes, of the weights in the policy folder; folder_s, until that folder is complete."""
    change_weights(learner)
    measured = verified(channel.publish(version), version)
    waited = timed(channel.wait_for_folder)
    index = json.loads((run.policy_directory(version) / "model.safetensors.index.json").read_text())
    return {**measured, "folder_s": waited, "bytes": float(index["metadata"]["total_size"])}


def publish_beside(learner: MegatronLearner, channel: WeightChannel, version: int) -> dict[str, float]:
    """Of a publish that the learner could train beside: how long it and the engines were held, and all of it."""
    change_weights(learner)
    held = timed(lambda: channel.begin(version))
    measured = verified(channel.finish(), version)
    channel.wait_for_folder()
    paused, total = measured["engines_paused_s"], measured["publish_s"]
    return dict(beside_held_s=held, beside_paused_s=paused, beside_publish_s=total)


def counted_buckets(channel: WeightChannel) -> list[int]:
    """The bytes of each bucket that is sent from now on."""
    assert isinstance(channel, StreamedChannel)
    sent, send = list[int](), channel._transport.send

    def noted(bucket: Bucket) -> None:
        sent.append(len(bucket.data))
        send(bucket)

    channel._transport.send = noted  # type: ignore[method-assign]
    return sent


def asking(channel: WeightChannel, hidden: int, rounds: int, num_buckets: int) -> list[float]:
    """Seconds until the process group has sent as many buckets as a publish has, of one norm each: what asking the
    engine takes. It is quarantined afterwards, without weights."""
    assert isinstance(channel, StreamedChannel)
    event_loop, session, transport = channel._event_loop, channel._session, channel._transport
    found, norm = list[float](), torch.ones(hidden, dtype=torch.bfloat16)
    report = event_loop.run(session.begin_weight_update())
    for _ in range(rounds):
        transport.open(report.engines, report.failures)
        for _ in range(num_buckets):
            for bucket in pack([("model.norm.weight", norm)], norm.nbytes, transport.new_buffer):
                transport.send(bucket)
        transport.finish()
        found.append(transport.wire_s)
    spoilt = {engine.index: "it was given norms alone" for engine in report.engines}
    event_loop.run(session.end_weight_update(0, Path(), None, spoilt))
    return found


def change_weights(learner: MegatronLearner) -> None:
    """A publish that changes nothing would pass by the last one."""
    with torch.no_grad():
        for chunk in learner.model:
            for parameter in chunk.parameters():
                parameter.mul_(1 + 2**-6)


def verified(measured: dict[str, float], version: int) -> dict[str, float]:
    if measured["engines_checked"] != 1 or measured.get("engines_failed", 0):
        raise SystemExit(f"error: the engine was not verified for version {version}: {measured}")
    return measured


def timed(action: Callable[[], None]) -> float:
    began = time.monotonic()
    action()
    return time.monotonic() - began


if __name__ == "__main__":
    die_with_parent()
    directory = RunDirectory(Path(sys.argv[1]))
    run_child(directory, "bench", lambda: measure(directory, int(sys.argv[2])))
