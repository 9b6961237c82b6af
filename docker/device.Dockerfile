# Where bundles become engines and answer:
#   docker build -f docker/device.Dockerfile -t edgellm-device .
#   docker run --rm -v "$PWD:/models" edgellm-device llm_build --onnxDir bundle --engineDir engine
# On a Jetson, on an image of NVIDIA's that brings CUDA and TensorRT of the board's release.
# JetPack 6.1, 6.2 (TensorRT 10.3, whose bindings need NumPy 1; a driver of CUDA 12):
#   docker build -f docker/device.Dockerfile --build-arg BASE=<l4t-jetpack image of r36.4> \
#     --build-arg PACKAGES="cuda-python<13 numpy<2 ml_dtypes<0.6" -t edgellm-device .
# JetPack 7.0, 7.1: an image for SBSA with TensorRT 10.13.3, whose bindings need NumPy 1, too
#   docker build -f docker/device.Dockerfile --build-arg BASE=<TensorRT image for arm64> \
#     --build-arg PACKAGES="cuda-python numpy<2 ml_dtypes<0.6" -t edgellm-device .
# JetPack 7.2 (10.16), DGX Spark and x86: the same with PACKAGES=cuda-python
# On a Jetson; --gpus all in place of --runtime nvidia elsewhere:
#   docker run --rm --runtime nvidia --group-add video --group-add "$(getent group render | cut -d: -f3)" -v "$PWD:/models" edgellm-device edgellm-doctor
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
ARG PACKAGES=
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
    && /opt/edgellm/bin/pip install --no-cache-dir "$(ls /wheels/*.whl)[${EXTRAS}]" ${PACKAGES} \
    && useradd --create-home edgellm
ENV PATH=/opt/edgellm/bin:${PATH}
USER edgellm
WORKDIR /models
CMD ["llm_inference", "--help"]
