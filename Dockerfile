# Not built yet by anybody: no registry of images could be reached.
# docker build -t qerl-bench .                                        # for CPUs
# docker build -t qerl-bench --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
# docker run --rm -v "$PWD/out:/out" qerl-bench run experiment=smoke quant=nvfp4 root=/out       # --gpus all with CUDA
FROM python:3.11-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Triton and pycosat (task=reasoning_gym) compile at run time and on installation; env.json asks git for the commit.
RUN apt-get update && apt-get install --yes --no-install-recommends build-essential git && rm -rf /var/lib/apt/lists/*
WORKDIR /qerl-bench
COPY constraints.txt .
RUN pip install --no-cache-dir --constraint constraints.txt --index-url $TORCH_INDEX --extra-index-url https://pypi.org/simple "torch>=2.11,<2.16"
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt --editable ".[all,reasoning]"
ENTRYPOINT ["qerl-bench"]
CMD ["--help"]
