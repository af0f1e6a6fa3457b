# Two images: `front` for the services without torch (gateway, tokenizer, scheduler, detokenizer, store), and `worker`,
# which is also the draft's; `worker-gpu` takes the place of the latter where there are GPUs.
# pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL) may be given as build arguments; none is needed.
ARG BASE=python:3.11-slim

# torch is installed by TORCH_SPEC; a torch for GPUs requires its own triton, and one for CPUs needs none (1 GB).
# The requirements alone, so that the layers below are built again when these change and not with all of pyproject.toml.
FROM ${BASE} AS requirements
COPY pyproject.toml .
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = p['optional-dependencies']; \
write = lambda name, lines: open(name, 'w').write('\n'.join(sorted(lines)) + '\n'); \
write('/front.txt', p['dependencies'] + extras['tokenizer']); \
write('/worker.txt', p['dependencies'] + [r for r in extras['worker'] if not r.startswith(('torch', 'triton'))])"

FROM ${BASE} AS pip
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_CACHE_DIR=/var/cache/pip
RUN python -m venv --without-pip /opt/venv

FROM pip AS front-packages
COPY --from=requirements /front.txt /
RUN --mount=type=cache,target=/var/cache/pip,sharing=locked \
    pip --python /opt/venv/bin/python install --only-binary :all: -r /front.txt

FROM pip AS worker-packages
ARG TORCH_SPEC=torch==2.13.0
RUN --mount=type=cache,target=/var/cache/pip,sharing=locked \
    pip --python /opt/venv/bin/python install --only-binary :all: "${TORCH_SPEC}"
COPY --from=requirements /worker.txt /
RUN --mount=type=cache,target=/var/cache/pip,sharing=locked \
    pip --python /opt/venv/bin/python install --only-binary :all: "${TORCH_SPEC}" -r /worker.txt \
 && rm -rf /opt/venv/lib/python3*/site-packages/torch/include

# For GPUs: TRITON_SPEC adds a triton where torch does not bring its own, as one for CPUs does not.
FROM worker-packages AS gpu-packages
ARG TRITON_SPEC=
RUN --mount=type=cache,target=/var/cache/pip,sharing=locked \
    if [ -n "${TRITON_SPEC}" ]; then \
      pip --python /opt/venv/bin/python install --only-binary :all: "${TORCH_SPEC}" "${TRITON_SPEC}"; \
    fi \
 && /opt/venv/bin/python -c "import triton; print('triton', triton.__version__)"

# The native kernels for each kind of processor: the image has no compiler.  Without them the worker computes in torch,
# several times slower, and says so at its start; so an image that cannot have a compiler is still an image.
FROM ${BASE} AS native
RUN (apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*) \
 || echo "no compiler could be installed: the worker will compute in torch"
WORKDIR /app
COPY kernels/__init__.py kernels/
COPY kernels/cpu/__init__.py kernels/cpu/
COPY kernels/cpu/binding/__init__.py kernels/cpu/binding/build.py kernels/cpu/binding/
COPY kernels/cpu/native kernels/cpu/native
RUN mkdir -p prebuilt && (! command -v g++ || python -m kernels.cpu.binding.build --into prebuilt)

FROM ${BASE} AS source
WORKDIR /app
COPY engine engine
COPY kernels kernels
COPY protos protos
COPY services services
COPY shared shared
RUN python -m compileall -q --invalidation-mode unchecked-hash .

# A user without rights, and the directories of the deployment's keys and of clients' files: a volume mounted there takes
# over its owner.
FROM ${BASE} AS runtime
RUN useradd --uid 1000 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin pageant \
 && install -d -o pageant -g pageant -m 0700 /run/pageant /var/lib/pageant
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PAGEANT_RUNTIME_DIR=/run/pageant \
    PAGEANT_STATUS_FILE=/tmp/status
WORKDIR /app
USER pageant
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m"]

FROM runtime AS front
COPY --from=front-packages /opt/venv /opt/venv
COPY --from=source /app /app
CMD ["services.gateway"]

FROM runtime AS worker
COPY --from=worker-packages /opt/venv /opt/venv
COPY --from=source /app /app
COPY --from=native /app/prebuilt /app/kernels/cpu/prebuilt
CMD ["services.worker"]

# Triton compiles kernels while the worker runs, each with a launcher in C that includes Python.h.  Both are loaded from
# its cache, where a volume keeps them: the directory must not be `noexec`, as /tmp is here.
FROM runtime AS worker-gpu
USER root
RUN apt-get update \
 && header="$(/usr/bin/env python -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h" \
 && apt-get install -y --no-install-recommends gcc libc6-dev $(test -e "$header" || echo python3-dev) \
 && rm -rf /var/lib/apt/lists/* \
 && install -d -o pageant -g pageant -m 0700 /var/cache/triton
ENV TRITON_CACHE_DIR=/var/cache/triton \
    CUDA_CACHE_PATH=/var/cache/triton/driver \
    LD_LIBRARY_PATH=/usr/lib/x86_64-linux-gnu:/usr/lib/aarch64-linux-gnu
# The driver's libcuda.so.1 is put there when the container starts; with a read-only root no ldconfig may have noticed.
COPY --from=gpu-packages /opt/venv /opt/venv
COPY --from=source /app /app
COPY --from=native /app/prebuilt /app/kernels/cpu/prebuilt
USER pageant
CMD ["services.worker"]
