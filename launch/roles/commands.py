"""Define `evenkeel role …`: the programs of a run, for whatever starts them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

role_app = typer.Typer(
    help="The programs of a run, for a cluster; `evenkeel train` starts the same programs on this machine.\n\n"
    "They share only the run directory and the network. Each may be started in any order, on any host, and again at "
    "will: it waits for the others, and a later start of a role takes over from an earlier start.\n\n"
    "**Exit status**: 0 the run is finished; 64 it has failed, do not start it again; 65 a later start has taken over, "
    "do not start this program again; 143 asked to end by SIGTERM, start it again to go on; "
    "anything else: start it again.\n\n"
    "**Environment**: EVENKEEL_API_KEY, or EVENKEEL_API_KEY_FILE, a file of mode 0600; needed for every --host that is "
    "not loopback. EVENKEEL_GRACE_S: seconds between SIGTERM and the end, in which the learner saves and an engine "
    "answers what is in flight (default 120).",
    no_args_is_help=True,
)

RunPath = Annotated[Path, typer.Argument(help="Run directory, the same on all hosts.", show_default=False)]
Host = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="Name or address by which other hosts reach this host; servers listen at that address."
    ),
]
MetricsPort = Annotated[
    int | None, typer.Option(min=1, max=65535, help="Show /metrics for Prometheus at this port of --host.")
]
RecipePath = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The recipe that the learner is given: wait until the run uses it. Default: any recipe.",
    ),
]
Port = Annotated[
    int | None,
    typer.Option(
        min=1, max=65535, help="Port of the server. Default: rollout.port or 30000, plus the index.", show_default=False
    ),
]


@role_app.command()
def learner(
    run: RunPath,
    node: Annotated[int, typer.Argument(help="Number of this host among the learner's hosts.")] = 0,
    nodes: Annotated[int, typer.Option(min=1, help="Hosts of the learner; its ranks are shared out evenly.")] = 1,
    recipe: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Recipe with which node 0 begins or continues the run; other nodes wait for that."
        ),
    ] = None,
    host: Host = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=1, max=65534, help="Port of torch's rendezvous on node 0; the agents take the next port.")
    ] = 29500,
    metrics_port: MetricsPort = None,
) -> None:
    """The learner's part on one host: starts torchrun for its ranks, and ends them when those of another host are gone.

    Node 0 freezes the recipe, publishes version 0, and writes where it listens to RUN/learner.json. The others read it
    there, and follow node 0 when it is started again elsewhere. The learner always starts as a whole, from its newest
    checkpoint. With weights.channel ipc on GPUs it waits until all engines have announced themselves.

    For example, on two hosts:

        evenkeel role learner /shared/runs/a 0 --nodes 2 --host n1 --recipe a.yaml

        evenkeel role learner /shared/runs/a 1 --nodes 2 --host n2 --recipe a.yaml
    """
    from launch.roles.learner import LearnerNode, run_learner_node
    from launch.roles.lifecycle import run_role
    from pipeline.data.run_directory import RunDirectory

    own = LearnerNode(RunDirectory(run.absolute()), node, nodes, host, port, recipe)
    name = "learner" if node == 0 else f"learner-node-{node}"
    run_role(own.run, name, lambda stop: run_learner_node(own, stop), metrics_port=metrics_port, host=host)


@role_app.command()
def collector(
    run: RunPath, recipe: RecipePath = None, host: Host = "127.0.0.1", metrics_port: MetricsPort = None
) -> None:
    """Ask the engines for every batch that the run lacks, score the answers, and commit the batches.

    Waits for the run to begin and for an engine. What was in flight when it ended is asked again.
    """
    from launch.roles.collector import run_collector
    from launch.roles.lifecycle import run_role
    from pipeline.data.run_directory import RunDirectory

    directory = RunDirectory(run.absolute())
    body = partial(run_collector, directory, recipe=recipe)
    run_role(directory, "collector", body, metrics_port=metrics_port, host=host)


@role_app.command()
def engine(
    run: RunPath,
    index: Annotated[int, typer.Argument(min=0, help="Which engine of the run this is.", show_default=False)],
    recipe: RecipePath = None,
    host: Host = "127.0.0.1",
    port: Port = None,
    nodes: Annotated[int, typer.Option(min=1, help="Hosts of this engine, which share its tensor parallel ranks.")] = 1,
    node: Annotated[int, typer.Option(min=0, help="Which of these hosts this is.")] = 0,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Show SGLang's /metrics on the engine's port; no key is needed there.")
    ] = False,
) -> None:
    """An SGLang server with the newest policy. It gets requests once the run's fleet has verified its weights.

    Announces itself in RUN/engines once it answers. At SIGTERM it takes that back, lets SGLang answer what is in
    flight, and stops it. The hosts of one engine meet at node 0's port + 10000; only node 0 answers requests.
    """
    from launch.roles.engine import EngineRole, run_engine
    from launch.roles.lifecycle import run_role
    from pipeline.data.run_directory import RunDirectory

    own = EngineRole(RunDirectory(run.absolute()), index, host, port, nodes, node, metrics, recipe)
    run_role(own.run, f"engine-{index}", lambda stop: run_engine(own, stop))


@role_app.command()
def router(
    run: RunPath,
    recipe: RecipePath = None,
    host: Host = "127.0.0.1",
    port: Port = None,
    metrics_port: MetricsPort = None,
) -> None:
    """SGLang's router in front of the engines; needed where a run has more than one.

    Starts without engines: the fleet, in learner and collector, gives it those that it has verified.
    """
    from launch.roles.engine import run_router
    from launch.roles.lifecycle import run_role
    from pipeline.data.run_directory import RunDirectory

    directory = RunDirectory(run.absolute())
    body = partial(run_router, directory, host=host, port=port, metrics_port=metrics_port, recipe=recipe)
    run_role(directory, "router", body)
