# Where bundles become engines and answer:
#   docker build -f docker/device.Dockerfile -t edgellm-device .
#   docker run --rm -v "$PWD:/models" edgellm-device llm_build --onnxDir bundle --engineDir engine
# On a Jetson, on an image of NVIDIA's that brings CUDA and TensorRT of the board's release.
# JetPack 6.1, 6.2 (TensorRT 10.3; its driver is of CUDA 12, hence CUDA_PYTHON):
#   docker build -f docker/device.Dockerfile --build-arg BASE=<l4t-jetpack image of r36.4> \
#     --build-arg EXTRAS=device,tensorrt,chat --build-arg CUDA_PYTHON='cuda-python<13' -t edgellm-device .
# JetPack 7.0, 7.1 (TensorRT 10.13.3) and 7.2 (10.16): an image for SBSA with that TensorRT
#   docker build -f docker/device.Dockerfile --build-arg BASE=<TensorRT image for arm64> \
#     --build-arg EXTRAS=device,tensorrt,chat -t edgellm-device .
# Either way:
#   docker run --rm --runtime nvidia -v "$PWD:/models" edgellm-device edgellm-doctor
# Engines belong to the machine: build them in a container on the device, not in the image.
ARG BASE=python:3.12-slim

FROM python:3.12-slim AS wheel
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
ARG EXTRAS=device,chat
ARG CUDA_PYTHON=
ENV PATH=/usr/local/cuda/bin:${PATH} CPATH=/usr/local/cuda/include LIBRARY_PATH=/usr/local/cuda/lib64
COPY --from=wheel /wheels /wheels
# JetPack images have Python without venv, and TensorRT's bindings among the system's packages;
# pycuda is compiled here, with their CUDA.
RUN if ! python3 -m venv --help >/dev/null 2>&1 || ! python3 -c "import ensurepip" 2>/dev/null; then \
        apt-get update && apt-get install -y --no-install-recommends python3 python3-venv \
        && rm -rf /var/lib/apt/lists/*; fi \
    && case ",${EXTRAS}," in *,tensorrt,*) \
        apt-get update && apt-get install -y --no-install-recommends python3-dev build-essential \
        && rm -rf /var/lib/apt/lists/*;; esac \
    && python3 -m venv --system-site-packages /opt/edgellm \
    && /opt/edgellm/bin/pip install --no-cache-dir "$(ls /wheels/*.whl)[${EXTRAS}]" ${CUDA_PYTHON:+"${CUDA_PYTHON}"} \
    && useradd --create-home edgellm
ENV PATH=/opt/edgellm/bin:${PATH}
USER edgellm
WORKDIR /models
CMD ["llm_inference", "--help"]
