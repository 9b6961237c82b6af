# Where checkpoints become bundles:
#   docker build -f docker/host.Dockerfile -t edgellm-host .
#   docker run --rm -v "$PWD:/models" edgellm-host edgellm-export llm --model_dir base --output_dir bundle
# To quantize as well: --build-arg EXTRAS=quantize --build-arg TORCH=torch==2.13.0
ARG BASE=python:3.12-slim

FROM ${BASE} AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY core core
COPY quantize quantize
COPY export export
COPY build build
COPY device_runtime device_runtime
COPY multimodal multimodal
COPY tools tools
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE}
ARG EXTRAS=export
# Named when an extra wants torch: an open range would pull gigabytes of CUDA packages.
ARG TORCH=
COPY --from=wheel /wheels /wheels
RUN if [ -n "${TORCH}" ]; then pip install --no-cache-dir "${TORCH}"; fi \
    && pip install --no-cache-dir "$(ls /wheels/*.whl)[${EXTRAS}]" \
    && useradd --create-home edgellm
USER edgellm
WORKDIR /models
CMD ["edgellm-export", "--help"]
