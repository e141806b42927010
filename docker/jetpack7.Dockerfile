# SpecEdge on JetPack 7 (Thor, and Orin from 7.2 on; Python 3.12, CUDA 13). Not built by this project yet: docs/gpu.md.
#   docker build -f docker/jetpack7.Dockerfile --build-arg ARCHITECTURE=110 -t specedge .     (Orin: 87)
# No index is known to hold a wheel with kernels for these boards, so ONNX Runtime is compiled: an hour or more.
ARG BASE=nvcr.io/nvidia/tensorrt:25.09-py3
FROM ${BASE} AS build
ARG ARCHITECTURE=110
ARG VERSION=v1.31.1
RUN apt-get update && apt-get install -y --no-install-recommends git cmake ninja-build && rm -rf /var/lib/apt/lists/*
RUN git clone --depth 1 --branch ${VERSION} --recursive https://github.com/microsoft/onnxruntime /onnxruntime
WORKDIR /onnxruntime
RUN ./build.sh --allow_running_as_root --config Release --update --build --parallel --skip_tests --build_wheel \
        --use_cuda --cuda_home /usr/local/cuda --cudnn_home /usr/lib/aarch64-linux-gnu \
        --use_tensorrt --tensorrt_home /usr/lib/aarch64-linux-gnu \
        --cmake_extra_defines CMAKE_CUDA_ARCHITECTURES=${ARCHITECTURE}

FROM ${BASE}
COPY --from=build /onnxruntime/build/Linux/Release/dist/*.whl /wheels/
COPY . /opt/specedge
RUN python3 -m pip install --no-cache-dir /wheels/*.whl \
        numpy==2.5.5 tokenizers==0.23.3 jinja2==3.1.6 click==8.5.1 rich==15.0.0 'setuptools>=77' \
    && python3 -m pip install --no-cache-dir --no-deps --no-build-isolation /opt/specedge

ENTRYPOINT ["specedge"]
CMD ["doctor"]
