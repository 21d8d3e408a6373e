# Meshwright on CPUs, for trials and for machines that only plan:
#   docker build -f docker/cpu.Dockerfile -t meshwright:cpu .
#   docker run --rm --shm-size=2g -v "$PWD/runs:/job/runs" meshwright:cpu train
# TORCH_INDEX is the index with the CPU build of torch; without it, pip takes the build of its own index.
FROM python:3.12-slim
ARG TORCH=2.13.0
ARG TORCH_INDEX=
# g++ compiles the blocks of plans with `compile`.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$TORCH"
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir "/src[tokenizers,huggingface,peft,tensorboard,parquet]" && rm -rf /src
RUN useradd --create-home --uid 1000 job && install -d -o job /job/runs
USER job
WORKDIR /job
ENTRYPOINT ["meshwright"]
CMD ["--help"]
