# A server on a CPU: docker build -t saccade . && docker run --rm -p 127.0.0.1:8000:8000 saccade
# Built and asked with buildah, from Debian's Python and PyTorch of PyPI (TORCH_BACKEND empty): where
# it was written the base image and PyTorch's own index were out of reach.
FROM python:3.12-slim AS build
ENV UV_LINK_MODE=copy
RUN pip install --no-cache-dir uv && uv venv /opt/saccade
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
# cpu, or what an accelerator needs (cu128); empty: PyTorch as PyPI has it
ARG TORCH_BACKEND=cpu
RUN uv pip install --no-cache --python /opt/saccade/bin/python \
    ${TORCH_BACKEND:+--torch-backend=$TORCH_BACKEND} ".[serve]"

FROM python:3.12-slim
# kernels are compiled for the processor they run on, at the first start
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home saccade
COPY --from=build /opt/saccade /opt/saccade
ENV PATH=/opt/saccade/bin:$PATH PYTHONUNBUFFERED=1
USER saccade
WORKDIR /home/saccade
EXPOSE 8000
HEALTHCHECK --start-period=5m CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["saccade", "serve", "--host", "0.0.0.0"]
