"""Define the command `evenkeel launch kubernetes`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from launch.terminal import Overrides, RecipePath, SizesFolder
from pipeline.errors import RecipeError

_JOBSET = "needed: JobSet 0.12 or newer, with featureGates: {RestartJob: true} in its manager's Configuration"
_WITHOUT_GATE = (
    "RestartJob and RestartJobAndIgnoreMaxRestarts failure policy actions are not allowed when RestartJob feature gate "
    "is disabled"
)
"""The answer of JobSet's webhook while the feature gate RestartJob is off, which is the default."""
_DELETE_ENGINES = "kubectl -n {} delete leaderworkerset {}-engine"


def kubernetes(
    recipe: RecipePath,
    out: Annotated[Path, typer.Option(help="Folder for the files.", show_default=False)],
    learner_image: Annotated[str, typer.Option(help="Image of the learner, NAME@sha256:….", show_default=False)],
    rollout_image: Annotated[
        str, typer.Option(help="Image of engines, router and collector, NAME@sha256:….", show_default=False)
    ],
    allow_tags: Annotated[bool, typer.Option("--allow-tags", help="Accept images by tag.")] = False,
    namespace: Annotated[str, typer.Option(help="Namespace of all objects.")] = "default",
    queue: Annotated[str | None, typer.Option(help="Kueue's LocalQueue; admits the run as a whole.")] = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, max=1024, help="GPUs of a node.")] = 8,
    gpu_gib: Annotated[float, typer.Option(help="Memory of each GPU, in GiB (an H100 has 79.6).")] = 80.0,
    gpu_resource: Annotated[str, typer.Option(help="Name of GPUs as a resource.")] = "nvidia.com/gpu",
    rdma: Annotated[
        str | None, typer.Option(metavar="RESOURCE=COUNT", help="RDMA devices of a node, as rdma/hca=8.")
    ] = None,
    disk_gb_s: Annotated[float | None, typer.Option(help="GB/s of the shared volume. Default: 2.")] = None,
    mount: Annotated[
        str, typer.Option(help="Where pods have the shared volume; relative paths of the recipe lie below it.")
    ] = "/evenkeel",
    pvc: Annotated[str | None, typer.Option(help="Existing claim to use, instead of a new claim.")] = None,
    storage_class: Annotated[
        str | None,
        typer.Option(help="Storage class of the new claim; it must allow ReadWriteMany. Default: the cluster's."),
    ] = None,
    engines: Annotated[
        Literal["jobset", "leaderworkerset"], typer.Option(help="Kind of object that runs the engines.")
    ] = "jobset",
    monitors: Annotated[
        bool, typer.Option("--monitors", help="Write a ServiceMonitor and alerts, for Prometheus' operator.")
    ] = False,
    run_as: Annotated[str, typer.Option(metavar="UID[:GID]", help="User of all pods and of their files.")] = "1000",
    download: Annotated[
        str | None,
        typer.Option(metavar="ORG/NAME[@REVISION]", help="Write a Job that brings this model to model.path."),
    ] = None,
    restart: Annotated[
        Literal["job", "jobset"],
        typer.Option(help="Restart after a failure of the learner: its Job (an alpha gate of JobSet), or all Jobs."),
    ] = "job",
    replace: Annotated[
        bool, typer.Option("--replace", help="The objects in --out are in no cluster: replace whatever differs.")
    ] = False,
    model_config: SizesFolder = None,
    overrides: Overrides = None,
) -> None:
    """Write the objects with which Kubernetes runs the recipe: a JobSet, and what it needs around it.

    GPUs, memory, /dev/shm and grace periods come from the plan. Recipe and options are checked before anything is
    written. The Secret is yours to make; no key is in any file. The same recipe and options give the same bytes. Where
    --out holds the run's objects already, only what a cluster lets one change may differ from them. What else your
    cluster wants (environment, node selectors, labels, zones) goes into an overlay beside --out.

    For example:  evenkeel launch kubernetes qwen3_32b --out k8s --queue train --learner-image … --rollout-image …
    """
    from launch.build.engines import check_extra_args
    from launch.plan.hosts import sizes_folder
    from launch.schedulers.kubernetes.pods import SECRET, SECRET_FILE
    from launch.schedulers.kubernetes.render import KUSTOMIZATION, MODEL, check_changes, read, render, write
    from launch.schedulers.kubernetes.run import cluster_options, run_on_kubernetes
    from pipeline.config.loader import find_recipe, load_recipe

    options = cluster_options(
        namespace=namespace,
        queue=queue,
        gpus_per_node=gpus_per_node,
        gpu_gib=gpu_gib,
        gpu_resource=gpu_resource,
        rdma=rdma,
        disk_gb_s=disk_gb_s,
        learner_image=learner_image,
        rollout_image=rollout_image,
        allow_tags=allow_tags,
        mount=mount,
        pvc=pvc,
        storage_class=storage_class,
        engines=engines,
        monitors=monitors,
        run_as=run_as,
        download=download,
        restart=restart,
    )
    path = find_recipe(recipe)
    loaded = load_recipe(path, overrides or [])
    check_extra_args(loaded)
    run = run_on_kubernetes(path, loaded, options, sizes_folder(path, loaded.model.path, model_config))
    files = render(run)
    objects = [one for name, group in files.items() if name != KUSTOMIZATION for one in group]
    if wrong := list(check_changes([] if replace else read(out, files, run.name), objects)):
        raise RecipeError(f"{out} is not written: {'; '.join(wrong[:5])}")
    write(files, out)
    if restart == "job":
        print(f"{_JOBSET}; without it, render with --restart jobset, since the run is refused: {_WITHOUT_GATE}")
    key = f"kubectl -n {namespace} create secret generic {SECRET} --from-file={SECRET_FILE}=FILE"
    print(f"once, with a FILE that holds the API key:  {key}")
    if download:
        storage = "" if pvc else f"-f {out}/10-storage.yaml "
        wait = f"kubectl -n {namespace} wait --for=condition=complete --timeout=24h job/{run.name}-model"
        print(f"once, and before the run:  kubectl apply {storage}-f {out / MODEL} && {wait}")
    print(f"kubectl apply -k {out}")
    if engines == "leaderworkerset":
        print(f"at the end, since nothing else ends the engines:  {_DELETE_ENGINES.format(namespace, run.name)}")
