# CPU image: docker build -t embodichain . && docker run --rm -v "$PWD/runs:/app/runs" embodichain train PushCubeRL
FROM python:3.11-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends libegl1 libgl1 libosmesa6 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY embodichain embodichain
COPY configs configs
# torch comes first, exactly pinned and from its CPU index: any other request brings gigabytes of CUDA packages.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -c constraints.txt "$(grep '^torch==' constraints.txt)" \
    && pip install --no-cache-dir -c constraints.txt ".[data,export]"
ENV MUJOCO_GL=egl
WORKDIR /app
ENTRYPOINT ["embodichain"]
CMD ["--help"]
