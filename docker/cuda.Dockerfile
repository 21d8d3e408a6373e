# Meshwright on NVIDIA devices; the host has the driver and the NVIDIA container toolkit:
#   docker build -f docker/cuda.Dockerfile -t meshwright:cuda .
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD/runs:/job/runs" meshwright:cuda train
# For InfiniBand add: --network=host --device=/dev/infiniband
# The torch package has the CUDA libraries and NCCL. TORCH_INDEX selects a build for another version of CUDA.
FROM python:3.12-slim
ARG TORCH=2.13.0
ARG TORCH_INDEX=
# g++ compiles blocks (`compile`), the ibverbs libraries let NCCL use InfiniBand, ssh is for launchers.
RUN apt-get update && apt-get install -y --no-install-recommends g++ ibverbs-providers libibverbs1 librdmacm1 \
        openssh-client && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$TORCH"
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir "/src[tokenizers,huggingface,peft,tensorboard,parquet]" && rm -rf /src
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN useradd --create-home --uid 1000 job && install -d -o job /job/runs
USER job
WORKDIR /job
ENTRYPOINT ["meshwright"]
CMD ["--help"]
