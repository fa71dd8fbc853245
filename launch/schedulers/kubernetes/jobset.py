"""The run as one JobSet: learner, collector, router and engines are admitted together and restarted apart.

What happens when a pod ends:

    exit 0    done. The set is done when learner and collector are, which ends router and engines too
    exit 65   a later start has taken over: tini makes it 0
    exit 64   nobody should try again: FailJob, and the set fails
    exit 143  somebody asked for it; likewise a pod that was evicted: started again, not counted
    else      counted. The learner starts again as a whole, from its checkpoint; others alone, after a while that grows

A learner, or an engine of several pods, that fails is a Job that fails: it alone is made again, or with `--restart
jobset` all of the run, which every JobSet can do. How often, the roles see to (launch.run.restarts): progress
forgives earlier restarts, and whoever was started too often without any ends with 64. The limits that Kubernetes keeps
are of the whole life of a run: they are only for pods that end before our program runs.

A pod whose node is lost has not ended, as far as Kubernetes knows: nothing takes its place before the Node is deleted
or has the taint node.kubernetes.io/out-of-service. A learner of several pods misses it sooner, and the others exit 1.
"""

from __future__ import annotations

from launch.schedulers.kubernetes.containers import RECIPE, Pod, pod_template, resources
from launch.schedulers.kubernetes.engines import at_most_on_a_node, engine_job_pod, near
from launch.schedulers.kubernetes.job import (
    HEARTBEAT_PORT,
    METRICS_PORT,
    RENDEZVOUS_PORT,
    ROUTER_METRICS_PORT,
    ROUTER_PORT,
    RunOnKubernetes,
)
from launch.schedulers.kubernetes.pods import (
    Affinity,
    PodAffinity,
    PodTemplate,
    WeightedAffinityTerm,
)
from launch.schedulers.kubernetes.probes import collector_probes, router_probes
from launch.schedulers.kubernetes.sets import (
    FailureAction,
    FailurePolicy,
    FailureRule,
    JobSet,
    JobSetSpec,
    JobSpec,
    JobTemplate,
    Network,
    OnExitCodes,
    OnPodCondition,
    PodFailurePolicy,
    PodFailureRule,
    ReplicatedJob,
    SuccessPolicy,
)
from pipeline.errors import FATAL_EXIT_CODE, STOPPED_EXIT_CODE

MOST_RESTARTS = 1000
"""Of all Jobs together, and of each pod that is replaced in its Job, in the whole life of a run."""
_NODE = {"EVENKEEL_NODE": "metadata.labels['batch.kubernetes.io/job-completion-index']"}


def job_set(run: RunOnKubernetes) -> JobSet:
    """All of a run's pods, but engines that a LeaderWorkerSet has. Overlays name roles by their place in the list: what
    a run may do without comes last."""
    jobs = [
        _job("learner", _learner(run), nodes=run.learner_nodes),
        _job("collector", _collector(run)),
    ]
    if run.options.engines == "jobset":
        engines = run.recipe.rollout.engines
        jobs.append(_job("engine", engine_job_pod(run), nodes=run.engine_nodes, replicas=engines))
    if run.has_router:
        jobs.append(_job("router", _router(run)))
    return JobSet(
        metadata=run.metadata(queued=True),
        spec=JobSetSpec(
            network=Network(subdomain=run.name),
            success_policy=SuccessPolicy(target_replicated_jobs=("learner", "collector")),
            failure_policy=_failure_policy(run),
            replicated_jobs=tuple(jobs),
        ),
    )


def _failure_policy(run: RunOnKubernetes) -> FailurePolicy:
    """Both ways in which a Job fails by podFailurePolicy have one reason; the message tells them apart."""
    again: FailureAction = "RestartJob" if run.options.restart == "job" else "RestartJobSet"
    uncounted: FailureAction = (
        "RestartJobAndIgnoreMaxRestarts" if again == "RestartJob" else "RestartJobSetAndIgnoreMaxRestarts"
    )
    by_rule = ("PodFailurePolicy",)
    fatal = f".*failed with exit code {FATAL_EXIT_CODE} matching.*"
    return FailurePolicy(
        max_restarts=MOST_RESTARTS,
        rules=(
            FailureRule(
                name="fatal",
                action="FailJobSet",
                on_job_failure_reasons=by_rule,
                on_job_failure_message_patterns=(fatal,),
            ),
            FailureRule(name="asked", action=uncounted, on_job_failure_reasons=by_rule),
            FailureRule(name="failed", action=again),
        ),
    )


def _job(role: str, template: PodTemplate, *, nodes: int = 1, replicas: int = 1) -> ReplicatedJob:
    """Pods of several nodes end and start together; a single pod is replaced in its Job."""
    together = nodes > 1 or role == "learner"
    return ReplicatedJob(
        name=role,
        replicas=replicas,
        template=JobTemplate(
            spec=JobSpec(
                completions=nodes,
                parallelism=nodes,
                backoff_limit=0 if together else MOST_RESTARTS,
                pod_failure_policy=_pod_failure_policy(role, together),
                template=template,
            )
        ),
    )


def _pod_failure_policy(role: str, together: bool) -> PodFailurePolicy:
    again: dict[str, str] = dict(action="FailJob" if together else "Ignore")
    return PodFailurePolicy(
        rules=(
            PodFailureRule(action="FailJob", on_exit_codes=OnExitCodes(container_name=role, values=(FATAL_EXIT_CODE,))),
            PodFailureRule(**again, on_pod_conditions=(OnPodCondition(type="DisruptionTarget"),)),
            PodFailureRule(**again, on_exit_codes=OnExitCodes(container_name=role, values=(STOPPED_EXIT_CODE,))),
        )
    )


def _host(run: RunOnKubernetes, role: str, pod: str = "0") -> str:
    """JobSet's stable name of a pod of a role's first Job."""
    return f"{run.name}-{role}-0-{pod}.{run.name}"


def _learner(run: RunOnKubernetes) -> PodTemplate:
    ports = dict(metrics=METRICS_PORT)
    if run.learner_nodes > 1:
        ports = dict(rendezvous=RENDEZVOUS_PORT, heartbeat=HEARTBEAT_PORT) | ports
    return pod_template(
        run,
        Pod(
            role="learner",
            image=run.options.learner_image,
            arguments=f"$(EVENKEEL_NODE) {RECIPE} --nodes {run.learner_nodes} --host $(EVENKEEL_HOST) "
            f"--port {RENDEZVOUS_PORT} --metrics-port {METRICS_PORT}",
            indices=_NODE,
            host=_host(run, "learner", "$(EVENKEEL_NODE)"),
            ports=ports,
            needs=run.needs.learner,
            resources=resources(run, run.needs.learner, run.learner_gpus),
            affinity=_close_together(run),
            spread=(at_most_on_a_node(run, "learner", 1),),  # two on one large node would be lost together
        ),
    )


def _collector(run: RunOnKubernetes) -> PodTemplate:
    return pod_template(
        run,
        Pod(
            role="collector",
            image=run.options.rollout_image,
            arguments=f"{RECIPE} --host $(EVENKEEL_HOST) --metrics-port {METRICS_PORT}",
            indices={},
            host=_host(run, "collector"),
            ports=dict(metrics=METRICS_PORT),
            needs=run.needs.collector,
            resources=resources(run, run.needs.collector),
            probes=collector_probes(),
            affinity=_close_together(run),
        ),
    )


def _router(run: RunOnKubernetes) -> PodTemplate:
    return pod_template(
        run,
        Pod(
            role="router",
            image=run.options.rollout_image,
            arguments=f"{RECIPE} --host $(EVENKEEL_HOST) --port {ROUTER_PORT} --metrics-port {ROUTER_METRICS_PORT}",
            indices={},
            host=_host(run, "router"),
            ports=dict(http=ROUTER_PORT, metrics=ROUTER_METRICS_PORT),
            needs=run.needs.router,
            resources=resources(run, run.needs.router),
            probes=router_probes(),
            affinity=_close_together(run),
        ),
    )


def _close_together(run: RunOnKubernetes) -> Affinity:
    near_run = WeightedAffinityTerm(weight=50, pod_affinity_term=near(run, None, run.options.topology_key))
    return Affinity(pod_affinity=PodAffinity(preferred=(near_run,)))
