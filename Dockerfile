# Three images: `core` (gym servers, agents, the collector), `cpu` (and the policy on vLLM, and the trainer, on a CPU), `gpu`.
# One mirror for all: docker build --build-arg PIP_INDEX_URL=... ; docker-compose.yml runs them.

FROM python:3.11-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 \
    PYTHONSAFEPATH=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
# The folder of the models is there from the start, so that a volume mounted on it belongs to this user. So does .cache,
# where vLLM keeps the kernels that it compiles: `install` gives only the named folders to the user, not their parents.
RUN useradd --uid 1000 --create-home ngym \
    && install -d -o ngym -g ngym /app /home/ngym/.cache /home/ngym/.cache/huggingface
WORKDIR /app
EXPOSE 8000
# A policy answers 503 while it loads; the first start may download it.
HEALTHCHECK --interval=10s --timeout=5s --start-period=900s --start-interval=1s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; \
        token = {'Authorization': 'Bearer ' + os.environ.get('NGYM_TOKEN', '')}; \
        r.urlopen(r.Request('http://127.0.0.1:8000/ready', headers=token), timeout=4)"]

FROM base AS wheel
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL
COPY . /source
# `data` has links into gym_servers, which a COPY of this folder alone would break.
RUN pip wheel --no-deps --wheel-dir /wheels /source && cp -rL /source/data /data

FROM base AS core
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL
COPY locks/core.txt /locks/
RUN pip install --no-deps --requirement /locks/core.txt
COPY --from=wheel /wheels /wheels
RUN pip install --no-deps /wheels/*.whl
COPY --from=wheel /data /app/data
USER ngym

FROM base AS cpu
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL
# vLLM's operators are linked with libnuma; g++ compiles a model where `engine: {enforce_eager: false}` asks for it.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ libnuma1 && rm -rf /var/lib/apt/lists/*
ENV PATH=/app/.venv/bin:$PATH
COPY . /app
RUN UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1 python scripts/install.py
USER ngym

FROM base AS gpu
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL
# Triton compiles kernels when they are first used.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY locks/core.txt /locks/
COPY --from=wheel /wheels /wheels
RUN pip install --constraint /locks/core.txt "$(echo /wheels/*.whl)[vllm,train,math,mcp,otel,structured,translation]"
COPY --from=wheel /data /app/data
USER ngym
