# For Ray and Kubernetes; docs/launch.md builds it.
FROM python:3.12
COPY . /attnres-jax
WORKDIR /attnres-jax
RUN pip install --no-cache-dir ".[tpu,gcs,ray,data,hf,plots]"
