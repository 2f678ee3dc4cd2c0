# For Ray and Kubernetes; docs/launch.md builds it.
FROM python:3.12
COPY . /attnres-jax
WORKDIR /attnres-jax
# Ray runs them in the container, for `ray up` and `ray exec --tmux`.
RUN apt-get update && apt-get install -y --no-install-recommends rsync tmux
RUN pip install --no-cache-dir ".[tpu,gcs,ray,data,hf,plots]"
