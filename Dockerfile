# A phase on a CPU, by a user who is not root:
#   docker build --tag infer --build-arg PIP_ARGS="--extra-index-url URL" .    (the CPU build of torch: see the Makefile)
#   docker run --publish 127.0.0.1:8009:8009 --volume infer-cache:/home/infer/.cache infer
# Other words than `serve 9 --host 0.0.0.0` may follow `infer`; the health check asks port 8009.

FROM python:3.11-slim-bookworm AS build
ARG PIP_ARGS=""
WORKDIR /source
COPY . .
RUN python -m venv /opt/tools && /opt/tools/bin/pip install --no-cache-dir build && /opt/tools/bin/python -m build
RUN python -m venv /opt/infer && /opt/infer/bin/pip install --no-cache-dir $PIP_ARGS -c constraints.txt dist/*.whl

FROM python:3.11-slim-bookworm
# The compiler stays: the native kernels are built at the first start, for the processor that the container runs on.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 infer && install --directory --owner infer /home/infer/.cache
COPY --from=build /opt/infer /opt/infer
ENV PATH=/opt/infer/bin:$PATH
USER infer
WORKDIR /home/infer
VOLUME /home/infer/.cache
EXPOSE 8009
HEALTHCHECK --start-period=2m --interval=10s \
    CMD ["python", "-c", "from urllib.request import *; build_opener(ProxyHandler({})).open('http://127.0.0.1:8009/health', timeout=5)"]
ENTRYPOINT ["infer"]
CMD ["serve", "9", "--host", "0.0.0.0"]
