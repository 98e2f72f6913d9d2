# The services' image. Its argument chooses one (`tweet_svc`), or a command (`mesh.migrate`): what `python -m` takes.
# No compiler and no pip are in it; it runs as 65532, on a root that may be read-only, and writes to /tmp alone.
#
# Name the base by its digest, for the same commit to give the same image: --build-arg PYTHON_IMAGE=python@sha256:…
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /build
COPY . ./
RUN python3 -m venv /opt/starling && pip="/opt/starling/bin/pip --disable-pip-version-check --no-cache-dir" && \
    $pip wheel --quiet --no-deps --wheel-dir dist . && \
    $pip install --quiet --only-binary :all: --constraint requirements.lock dist/*.whl && \
    $pip uninstall --quiet --yes pip setuptools && \
    /opt/starling/bin/python -m compileall -q /opt/starling/lib

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/starling /opt/starling
ENV PATH=/opt/starling/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["python", "-m"]
CMD ["tweet_svc"]
