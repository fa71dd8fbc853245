"""Probes: when a pod is up, when it serves the right weights, and when it must be started again.

An engine is up once /health answers: after version 0 was written and the weights were read. It is ready when it also
serves the published version, which the kubelet cannot ask for (it has no key): `probe.py` does, inside the
container. It is alive while /health answers. That call samples nothing, so it is answered during a weight update and
beside the longest prefill, and a minute of refusals means that the server is gone.

Learner and collector have no liveness probe. Every wait of theirs has a deadline, and a restart costs the work since
the last checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launch.run.addresses import NAME_DEADLINE_S
from launch.run.waiting import RECIPE_DEADLINE_S
from launch.schedulers.kubernetes.job import ENGINE_PORT, RunOnKubernetes
from launch.schedulers.kubernetes.pods import ExecAction, HttpGetAction, Probe, TcpSocketAction

_PERIOD_S = 10
_GONE_S = 60
"""Of silence, after which an engine is started again."""
_EXEC_S = 20
"""Timeout and period of probes that run a program: it ends by itself after `probe.DEADLINE_S`, and a
busy host takes seconds to start Python."""


@dataclass(frozen=True, kw_only=True)
class Probes:
    """Of one container."""

    startup: Probe | None = None
    readiness: Probe | None = None
    liveness: Probe | None = None


NO_PROBES = Probes()


def engine_start_s(run: RunOnKubernetes) -> int:
    """The longest that an engine may take. It gives up by itself: it waits for its own name and for the recipe, and
    start_deadline_s bounds its wait for version 0, and then reading the weights."""
    waits_s = NAME_DEADLINE_S + RECIPE_DEADLINE_S + 2 * run.recipe.rollout.start_deadline_s
    return run.needs.first_policy_s + math.ceil(waits_s)


def engine_probes(run: RunOnKubernetes) -> Probes:
    """Of every pod of an engine. Only its first node answers HTTP, so of several each asks the program."""
    return Probes(
        startup=_alive(run, for_s=engine_start_s(run)),
        readiness=Probe(exec=_ask(run), period_seconds=_EXEC_S, timeout_seconds=_EXEC_S, failure_threshold=2),
        liveness=_alive(run, for_s=_GONE_S),
    )


def _alive(run: RunOnKubernetes, *, for_s: int) -> Probe:
    """Fails once the engine has not answered for so long."""
    if run.engine_nodes > 1:
        return Probe(
            exec=_ask(run, "--alive"),
            period_seconds=_EXEC_S,
            timeout_seconds=_EXEC_S,
            failure_threshold=math.ceil(for_s / _EXEC_S),
        )
    return Probe(
        http_get=HttpGetAction(path="/health", port="http"),
        period_seconds=_PERIOD_S,
        timeout_seconds=5,
        failure_threshold=math.ceil(for_s / _PERIOD_S),
    )


def _ask(run: RunOnKubernetes, *options: str) -> ExecAction:
    command = (
        "python",
        "-P",
        "-m",
        "launch.schedulers.kubernetes.probe",
        run.directory,
        "--port",
        str(ENGINE_PORT),
        *options,
    )
    return ExecAction(command=command)


def router_probes() -> Probes:
    """Ready with an engine behind it, alive without one."""
    alive = HttpGetAction(path="/liveness", port="http")
    return Probes(
        startup=Probe(http_get=alive, period_seconds=5, timeout_seconds=5, failure_threshold=60),
        readiness=Probe(
            http_get=HttpGetAction(path="/readiness", port="http"),
            period_seconds=_PERIOD_S,
            timeout_seconds=5,
            failure_threshold=3,
        ),
        liveness=Probe(http_get=alive, period_seconds=_PERIOD_S, timeout_seconds=5, failure_threshold=6),
    )


def collector_probes() -> Probes:
    """Ready once it has begun."""
    metrics = TcpSocketAction(port="metrics")
    return Probes(readiness=Probe(tcp_socket=metrics, period_seconds=_PERIOD_S, timeout_seconds=5, failure_threshold=3))
