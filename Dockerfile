# One image for every service: `docker build --target cpu .`, or `--target cuda` for NVIDIA GPUs.
#
# The CPU image holds no torch (the native engine needs none) and has its kernels compiled in. A model is no part of
# an image: /models is a volume, which `baton pull` fills.

FROM python:3.11-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# What is built, and the compiler for it, stays behind in stages of their own.
FROM base AS build
RUN apt-get update -q \
    && apt-get install -y -q --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY services services
COPY libs libs
COPY kernels kernels
RUN pip wheel --no-deps --wheel-dir /wheel .

FROM base AS packages
WORKDIR /src
RUN python -m venv /opt/baton
COPY pyproject.toml deploy/image/requirements.py ./
RUN python requirements.py >requirements.txt && /opt/baton/bin/pip install -r requirements.txt
COPY --from=build /wheel /wheel
RUN /opt/baton/bin/pip install --no-deps /wheel/*.whl

# What both images have in common: a user without rights, and the folders that volumes are mounted on, which take
# their owner from here. Everything else may be read-only; HOME and temporary files go to /tmp.
FROM base AS runtime
RUN groupadd --gid 10001 baton \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin baton \
    && for one in nats redis gateway tokenizer router prefill decode kvstore metrics batch operator; do \
        mkdir -p "/secrets/$one"; done \
    && mkdir -p /models /kv /data \
    && chown -R 10001:10001 /secrets /models /kv /data
ENV PATH=/opt/baton/bin:$PATH HOME=/tmp BATON_MODEL_CACHE_DIR=/models BATON_SERVICE_STATE_FILE=/tmp/baton-state
USER 10001:10001
WORKDIR /tmp
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 CMD ["baton", "doctor", "--probe", "ready"]
ENTRYPOINT ["baton"]
CMD ["--help"]

FROM runtime AS cpu
COPY --from=packages /opt/baton /opt/baton

# The CUDA image: with torch, whose wheels bring CUDA, and a compiler, as Triton compiles its launchers when it first
# needs them.
FROM base AS cuda-packages
WORKDIR /src
RUN python -m venv /opt/baton
COPY pyproject.toml deploy/image/requirements.py ./
RUN python requirements.py --torch gpu >requirements.txt && /opt/baton/bin/pip install -r requirements.txt
COPY --from=build /wheel /wheel
RUN /opt/baton/bin/pip install --no-deps /wheel/*.whl

FROM runtime AS cuda
USER root
RUN apt-get update -q \
    && apt-get install -y -q --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
USER 10001:10001
COPY --from=cuda-packages /opt/baton /opt/baton
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM cpu
