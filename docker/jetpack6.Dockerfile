# SpecEdge on JetPack 6 (Orin; Python 3.10, CUDA 12.6, TensorRT 10.3). Not built by this project yet: docs/gpu.md.
#   docker build -f docker/jetpack6.Dockerfile -t specedge .
#   docker run --rm -it --runtime nvidia -v $PWD/my-bundle:/bundle specedge chat /bundle
FROM nvcr.io/nvidia/l4t-jetpack:r36.4.0

RUN apt-get update && apt-get install -y --no-install-recommends python3-pip && rm -rf /var/lib/apt/lists/*

# PyPI's onnxruntime-gpu has no wheel for Python 3.10 on aarch64, and its newer ones have no kernels for Orin (8.7).
RUN python3 -m pip install --no-cache-dir \
        numpy==2.2.6 tokenizers==0.23.3 jinja2==3.1.6 click==8.5.1 rich==15.0.0 \
    && python3 -m pip install --no-cache-dir --no-deps \
        --index-url https://pypi.jetson-ai-lab.io/jp6/cu126 onnxruntime-gpu==1.23.0 \
    && python3 -m pip install --no-cache-dir coloredlogs flatbuffers packaging protobuf sympy

COPY . /opt/specedge
RUN python3 -m pip install --no-cache-dir --upgrade pip 'setuptools>=77' \
    && python3 -m pip install --no-cache-dir --no-deps --no-build-isolation /opt/specedge

ENTRYPOINT ["specedge"]
CMD ["doctor"]
