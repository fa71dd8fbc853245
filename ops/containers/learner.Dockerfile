# syntax=docker/dockerfile:1.7
# The learner: Megatron-Core on an image of NVIDIA that brings torch and Transformer Engine, built for one another. No SGLang.
#
#     docker build -f ops/containers/learner.Dockerfile -t REGISTRY/evenkeel/learner .        (in the root of the repository)
#
# The base is pinned by tag: the first one with torch 2.11 (README.md beside this file). Its digest could not be looked up where
# this file was written, and no GPU image has been built there: give --build-arg BASE=NAME@sha256:…, which `docker buildx
# imagetools inspect` prints.
ARG BASE=nvcr.io/nvidia/pytorch:26.02-py3

FROM ${BASE} AS build
# NVIDIA's images hold pip to their own versions; ours are locked, and lie in an environment in front of theirs.
ENV PIP_CONSTRAINT= PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY ops/locks/learner.txt lock.txt
RUN python3 -m venv --system-site-packages /opt/evenkeel \
    && /opt/evenkeel/bin/python -m pip install --no-deps -r lock.txt
COPY pyproject.toml README.md LICENSE ./
COPY precision precision
COPY pipeline pipeline
COPY megatron_bridge megatron_bridge
COPY rollout_sglang rollout_sglang
COPY launch launch
RUN /opt/evenkeel/bin/python -m pip install --no-deps --no-build-isolation .

FROM ${BASE}
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini=0.19.* \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/evenkeel /opt/evenkeel
ENV PATH=/opt/evenkeel/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp HF_HUB_OFFLINE=1
RUN python -c "import torch, transformer_engine; v = torch.__version__; assert tuple(map(int, v.split('.')[:2])) >= (2, 11), v" \
    && ! python -c "import sglang" 2>/dev/null
# The root file system is read-only in a pod: programs write to the shared volume and to /tmp.
USER 1000:1000
WORKDIR /tmp
# PID 1 hands SIGTERM on and reaps what roles leave behind. 65: a later start has taken over, which is no failure.
ENTRYPOINT ["tini", "-e", "65", "--"]
CMD ["evenkeel", "--help"]
