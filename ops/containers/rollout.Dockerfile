# syntax=docker/dockerfile:1.7
# Engines, router and collector, on the stock image of SGLang. Engines run in its own Python, in which nothing is replaced or
# added; Even Keel has an environment of its own. No Megatron.
#
#     docker build -f ops/containers/rollout.Dockerfile -t REGISTRY/evenkeel/rollout .        (in the root of the repository)
#
# The base is pinned by tag. Its digest could not be looked up where this file was written, and no GPU image has been built
# there: give --build-arg BASE=NAME@sha256:…, which `docker buildx imagetools inspect` prints.
ARG BASE=lmsysorg/sglang:v0.5.23

FROM ${BASE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY ops/locks/rollout.txt lock.txt
RUN python3 -m venv /opt/evenkeel \
    && /opt/evenkeel/bin/python -m pip install --no-deps -r lock.txt
COPY pyproject.toml README.md LICENSE ./
COPY precision precision
COPY pipeline pipeline
COPY megatron_bridge megatron_bridge
COPY rollout_sglang rollout_sglang
COPY launch launch
RUN /opt/evenkeel/bin/python -m pip install --no-deps .

FROM ${BASE}
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap=0.* tini=0.19.* \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/evenkeel /opt/evenkeel
# SGLang's own Python, by the name that it has in the base; /opt/evenkeel/bin has another python3.
RUN printf '#!/bin/sh\nexec %s "$@"\n' "$(command -v python3)" > /opt/sglang-python && chmod 755 /opt/sglang-python
ENV PATH=/opt/evenkeel/bin:$PATH EVENKEEL_ROLLOUT_PYTHON=/opt/sglang-python PYTHONUNBUFFERED=1 HOME=/tmp HF_HUB_OFFLINE=1
# One NCCL in both images: NCCL forms no group of two releases. If the base has another, build the learner with that.
ARG NCCL=2.30.7
RUN cd /opt/evenkeel/lib/python3*/site-packages \
    && test "$(/opt/sglang-python -P rollout_sglang/server/run_module.py pipeline.nccl)" = "${NCCL}" \
    && /opt/sglang-python -c "import importlib.metadata as m; assert m.version('sglang') == '0.5.23', m.version('sglang')" \
    && ! python -c "import megatron" 2>/dev/null
# The root file system is read-only in a pod: programs write to the shared volume and to /tmp.
USER 1000:1000
WORKDIR /tmp
# PID 1 hands SIGTERM on and reaps what roles leave behind. 65: a later start has taken over, which is no failure.
ENTRYPOINT ["tini", "-e", "65", "--"]
CMD ["evenkeel", "--help"]
