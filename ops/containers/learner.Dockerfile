# syntax=docker/dockerfile:1.7
# The learner: Megatron-Core, torch and Transformer Engine by exact lists, on NVIDIA's CUDA image. No SGLang.
#
#     docker build -f ops/containers/learner.Dockerfile -t REGISTRY/evenkeel/learner .        (in the root of the repository)
#
# The base is pinned by tag. Its digest could not be looked up where this file was written, and no GPU image has been built
# there: give --build-arg BASE=NAME@sha256:…, which `docker buildx imagetools inspect` prints. It needs nvcc and the headers of
# CUDA 13, for Transformer Engine's extension of torch, which PyPI has as source alone.
ARG BASE=nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04

FROM ${BASE} AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends git=1:2.* python3=3.12.* python3-dev=3.12.* python3-venv=3.12.* \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY ops/locks/learner.txt ops/locks/learner-gpu.txt ./
# First all packages but the extension, which is compiled against torch.
RUN python3 -m venv /opt/evenkeel \
    && grep -v '^transformer-engine-torch==' learner-gpu.txt > wheels.txt \
    && /opt/evenkeel/bin/python -m pip install --no-deps -r learner.txt -r wheels.txt
RUN NVTE_FRAMEWORK=pytorch CPATH="$(printf '%s:' /opt/evenkeel/lib/python3.12/site-packages/nvidia/*/include)" \
    /opt/evenkeel/bin/python -m pip install --no-deps --no-build-isolation -r learner-gpu.txt
COPY pyproject.toml README.md LICENSE ./
COPY precision precision
COPY pipeline pipeline
COPY megatron_bridge megatron_bridge
COPY rollout_sglang rollout_sglang
COPY launch launch
RUN /opt/evenkeel/bin/python -m pip install --no-deps .

FROM ${BASE}
# Triton compiles its launchers with gcc and Python's headers.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap=0.* python3=3.12.* python3-dev=3.12.* tini=0.19.* \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/evenkeel /opt/evenkeel
ENV PATH=/opt/evenkeel/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp HF_HUB_OFFLINE=1
# One NCCL in both images: NCCL forms no group of two releases.
ARG NCCL=2.30.7
RUN test "$(python -m pipeline.nccl)" = "${NCCL}" \
    && ! python -c "import sglang" 2>/dev/null
# The root file system is read-only in a pod: programs write to the shared volume and to /tmp.
USER 1000:1000
WORKDIR /tmp
# PID 1 hands SIGTERM on and reaps what roles leave behind. 65: a later start has taken over, which is no failure.
ENTRYPOINT ["tini", "-e", "65", "--"]
CMD ["evenkeel", "--help"]
