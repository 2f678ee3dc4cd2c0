# SPDX-License-Identifier: Apache-2.0
"""A pipeline computes what one device does, and sends what was planned.

In float32 the two differ by rounding: a pipeline adds up microbatches, chunks
and devices in an order of its own. What is proven here is that nothing else is
in that difference. In float64, where rounding is 1e-16, loss and gradient of
both agree to 1e-12 of each parameter's largest gradient, for all shapes, cache
rules, meshes and kinds of sublayers. And in float32 the gradient of a pipeline
is as far from that of float64 as the gradient of one device is, within a factor
of two, in the median over a few draws of weights and tokens. (They found 0.5 to
1.85, and 0.5 to 2.3 with a single draw. `data` is the other axis there.)
"""

import collections
import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import checkpoint
from attnres_jax import config as config_lib
from attnres_jax import loss as loss_lib
from attnres_jax import models
from attnres_jax import precision
from attnres_jax import sharding
from attnres_jax import train_state
from attnres_jax.aot import hlo
from attnres_jax.aot import topology
from attnres_jax.config import errors
from attnres_jax.models import residuals
from attnres_jax.models.residuals import prenorm
from attnres_jax.pipeline import layout as layout_lib
from attnres_jax.pipeline import spmd
from tests import jaxprs
from tests import tiny_network

# Tokens that ranks cannot share equally.
VOCAB, WIDTH, LENGTH = 16, 16, 7
# Ranks, virtual stages, microbatches, sublayers, sublayers per block.
SMALL = (2, 2, 4, 4, 3)
SHAPES = [
  (4, 2, 8, 16, 4),
  (4, 2, 8, 16, 3),
  (4, 4, 8, 32, 5),
  (2, 3, 4, 12, 2),
  (4, 1, 8, 8, 2),
]


def _config(
  shape, mesh=None, *, scheme="block_attnres", pipeline=None, **model
):
  ranks, stages, microbatches, sublayers, block = shape
  mesh = config_lib.MeshConfig(**{"stage": ranks, "data": 1} | (mesh or {}))
  rows = microbatches * mesh.data * mesh.fsdp * mesh.expert
  return config_lib.RunConfig(
    model=tiny_network.config(
      scheme,
      vocab_size=VOCAB,
      width=WIDTH,
      num_layers=sublayers // 2,
      block_size=block,
      **model,
    ),
    data=config_lib.DataConfig(sequence_length=LENGTH, batch_size=rows),
    mesh=mesh,
    pipeline=config_lib.PipelineConfig(
      stages, microbatches, **(pipeline or {})
    ),
  )


@contextlib.contextmanager
def _in_float64(config):
  """The same run in float64, which no config can request."""
  with (
    pytest.MonkeyPatch.context() as patch,
    jax.enable_x64(True),
    # Master weights are float32 where only shapes are asked for.
    jax.numpy_dtype_promotion("standard"),
  ):
    patch.setattr(errors, "check_in", lambda *_: None)
    model = dataclasses.replace(config.model, dtype="float64")
    yield dataclasses.replace(config, model=model)


def _inputs(config, seed=0):
  """A model of random numbers, and rows of which some count.

  The numbers are the same in float32 and in float64.
  """
  rng = np.random.default_rng(seed)
  dtype = precision.wide(config.model.dtype)

  def draw(path, leaf):
    is_gain = "gain" in jax.tree_util.keystr(path)
    drawn = 0.2 * rng.standard_normal(leaf.shape, np.float32)
    return (is_gain + drawn).astype(dtype)

  like = jax.eval_shape(lambda: models.build_model(config.model))
  model = jax.tree.map_with_path(draw, like)
  rows = config.data.batch_size
  tokens = rng.integers(0, VOCAB, (rows, LENGTH + 1), dtype=np.int32)
  weights = rng.integers(0, 2, (rows, LENGTH)).astype(np.float32)
  rows = (tokens[:, :-1], tokens[:, 1:], weights)
  return model, loss_lib.Examples(*rows, None)


@functools.cache
def _on_one_device(config):
  def total(model, batch):
    sums = loss_lib.cross_entropy(
      model.hidden(batch.inputs),
      model.embedding.head_DV(),
      batch.targets,
      batch.weights,
      z_loss=config.loss.z_loss,
    )
    return sums.total, sums

  apply = jax.jit(jax.grad(total, has_aux=True))
  # Loss first, as a pipeline has it.
  return lambda *arguments: apply(*arguments)[::-1]


def _alone(config):
  """The result of one device."""
  plain = config_lib.MeshConfig(data=1), config_lib.PipelineConfig()
  return dataclasses.replace(config, mesh=plain[0], pipeline=plain[1])


def _pipeline(config):
  return spmd.make_pipeline(config, sharding.make_mesh(config.mesh))


@functools.cache
def _compiled(config, method="value_and_grad"):
  model, batch = _inputs(config)
  apply = jax.jit(getattr(_pipeline(config), method))
  return apply.lower(model, batch).compile(), (model, batch)


def _call(compiled, arguments):
  return compiled(*jax.device_put(arguments, compiled.input_shardings[0]))


def _assert_equal(found, expected, rounding):
  for a, b in zip(found[0], expected[0]):
    np.testing.assert_allclose(a, b, rtol=rounding)
  names = jax.tree_util.tree_leaves_with_path(expected[1])
  for (path, b), a in zip(names, jax.tree.leaves(found[1]), strict=True):
    assert a.dtype == b.dtype
    # A sum of many terms, whose order differs.
    scale = float(jnp.max(jnp.abs(b)))
    np.testing.assert_allclose(
      a, b, rtol=0, atol=rounding * scale, err_msg=jax.tree_util.keystr(path)
    )


def _assert_as_on_one_device(config):
  """In float64, where rounding cannot hide a mistake."""
  with _in_float64(config) as config:
    compiled, arguments = _compiled(config)
    expected = _on_one_device(_alone(config))(*arguments)
    assert all(a.dtype == jnp.float64 for a in jax.tree.leaves(expected))
    _assert_equal(_call(compiled, arguments), expected, 1e-12)
  return compiled


def _assert_as_exact_as_one_device(config, draws=5):
  """In float32, against the gradient of one device in float64."""
  compiled, _ = _compiled(config)
  inputs = [_inputs(config, seed) for seed in range(draws)]
  found = [jax.device_get(_call(compiled, one)) for one in inputs]
  apply = _on_one_device(_alone(config))
  plain = [jax.device_get(apply(*one)) for one in inputs]
  with _in_float64(config) as wide:
    apply = _on_one_device(_alone(wide))
    inputs = [_inputs(wide, seed) for seed in range(draws)]
    exact = [jax.device_get(apply(*one)) for one in inputs]
  for (loss, _), (expected, _) in zip(found, exact, strict=True):
    np.testing.assert_allclose(loss.total, expected.total, rtol=1e-6)
  ours, theirs = (_errors(several, exact) for several in (found, plain))
  for path, error in ours.items():
    # 1e-7 of the largest is what float32 can tell apart.
    assert error <= 2 * theirs[path] + 1e-7, path


def _errors(found, exact):
  """RMS error of each parameter's gradient over its largest, in the median."""
  errors = collections.defaultdict(list)
  for (_, ours), (_, theirs) in zip(found, exact, strict=True):
    named = jax.tree_util.tree_leaves_with_path(theirs)
    for (path, b), a in zip(named, jax.tree.leaves(ours), strict=True):
      errors[jax.tree_util.keystr(path)].append(_rms(a - b) / np.max(np.abs(b)))
  return {path: np.median(several) for path, several in errors.items()}


def _rms(a):
  return np.sqrt(np.mean(np.square(a)))


def _permutes(text):
  """(bytes of an array, pairs) of every permute of a compiled program."""
  pattern = r"= \(?(\w+)\[([\d,]*)\].* collective-permute(?:-start)?\(.*"
  found = []
  for match in re.finditer(pattern, text):
    (pairs,) = re.findall(r"source_target_pairs=\{(.*?)\}\}", match[0])
    sizes = [int(n) for n in match[2].split(",") if n]
    itemsize = {"f64": 8, "f32": 4, "bf16": 2}[match[1]]
    found.append((itemsize * int(np.prod(sizes)), pairs.count("{")))
  return found


def _bodies(text):
  """The text of what loops and branches run, by computation."""
  parts = re.split(r"\n(?=(?:ENTRY )?%[\w.\-]+ \()", text)
  return [part for part in parts if not part.startswith("ENTRY")]


@pytest.mark.slow
def test_unaligned_blocks():
  """And what the program sends: planned blocks, and gradients at the end."""
  config = _config(SMALL, dict(data=2))
  compiled = _assert_as_on_one_device(config)
  text = compiled.as_text()
  # Chunks of one sublayer, blocks of three: b0 goes into chunk 1, b1 into chunk
  # 3, both over the link into rank 1, and a partial sum into chunks 1 and 2.
  layout = layout_lib.Layout(2, 2, 1, 3)
  assert layout.link_vectors("minimum") == (0, 1)
  assert layout.link_partials() == (True, True)
  permutes = _permutes(text)
  assert {nbytes for nbytes, _ in permutes} == {8 * LENGTH * WIDTH}
  # Forward and backward, in both copies of the pipeline.
  assert sum(pairs for _, pairs in permutes) == 2 * 2 * (1 + 2)
  loops = [body for body in _bodies(text) if "collective-permute" in body]
  assert len(loops) == 1
  assert not re.search(r" (all-reduce|all-gather|reduce-scatter)", loops[0])
  assert " all-reduce(" in text


@pytest.mark.parametrize(
  "shape,scheme,fields",
  [
    # The second chunk begins within a block.
    ((2, 1, 2, 8, 3), "block_attnres", {}),
    pytest.param(
      (2, 1, 2, 8, 2), "block_attnres", {}, marks=pytest.mark.slow
    ),
    # Blocks begin within a pattern, and recomputation.
    pytest.param(
      (2, 1, 2, 24, 3), "block_attnres",
      dict(scan_layers=True, remat="full"), marks=pytest.mark.slow,
    ),
    pytest.param(
      (2, 2, 4, 16, 2), "block_attnres", {}, marks=pytest.mark.slow
    ),
    pytest.param(
      (2, 1, 2, 8, 1), "full_attnres", dict(schedule_size=2),
      marks=pytest.mark.slow,
    ),
    pytest.param(
      (2, 1, 2, 8, 1), "full_attnres", dict(schedule_size=3),
      marks=pytest.mark.slow,
    ),
  ],
)  # fmt: skip
def test_sublayers_of_a_chunk_as_one_loop(shape, scheme, fields):
  _assert_as_on_one_device(
    _config(shape, scheme=scheme, depth_loop="scan", **fields)
  )


def test_loops_of_chunks_do_not_grow_with_depth():
  def products(sublayers, **fields):
    config = _config((2, 1, 2, sublayers, 2), **fields)
    apply, arguments = _pipeline(config).value_and_grad, _inputs(config)
    return jaxprs.count(("dot_general",), apply, *arguments)

  assert products(8, depth_loop="scan") == products(16, depth_loop="scan")
  assert products(8) < products(16)


@pytest.mark.parametrize(
  "shape,scheme,reason",
  [
    ((2, 2, 4, 8, 2), "block_attnres", "no pattern of sublayers repeats"),
    ((2, 1, 2, 8, 2), "prenorm", "with PreNorm"),
  ],
)
def test_chunks_that_are_no_loops(shape, scheme, reason):
  with pytest.raises(config_lib.ConfigError, match=f"depth_loop.*{reason}"):
    _pipeline(_config(shape, scheme=scheme, depth_loop="scan"))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_one_virtual_stage_sends_what_was_planned_and_nothing_else(ranks):
  config = _config((ranks, 1, ranks, ranks, 1))
  compiled, _ = _compiled(config)
  layout = layout_lib.Layout(ranks, 1, 1, 1)
  sent = sum(n * pairs for n, pairs in _permutes(compiled.as_text()))
  planned = layout.total_vectors("minimum") + layout.total_partials()
  assert planned == {2: 2, 4: 2 + 3 + 4}[ranks]
  assert sent == 2 * planned * 4 * LENGTH * WIDTH


def test_autodiff_of_the_forward_loop_and_evaluation():
  shape, by_autodiff = (2, 1, 2, 2, 1), dict(schedule="gpipe")
  config = _config(shape, scheme="prenorm", pipeline=by_autodiff)
  compiled, arguments = _compiled(config)
  expected = _on_one_device(_alone(config))(*arguments)
  _assert_equal(_call(compiled, arguments), expected, 1e-6)
  compiled, _ = _compiled(config, "loss_sums")
  for a, b in zip(_call(compiled, arguments), expected[0]):
    np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("gather", ["tick", "step"])
def test_weights_that_are_cut_over_devices_of_a_rank(gather):
  pipeline = dict(gather=gather)
  _assert_as_on_one_device(
    _config((2, 1, 2, 2, 1), dict(fsdp=2), scheme="rescaled", pipeline=pipeline)
  )


def _of_all_kinds(mesh, **fields):
  fields = tiny_network.KINDS | dict(last_mixer="mla") | fields
  return _config((2, 1, 2, 4, 2), mesh, **fields)


def _with_experts(mesh, **fields):
  return _config((2, 1, 2, 4, 2), mesh, moe=tiny_network.KINDS["moe"], **fields)


@pytest.mark.parametrize(
  "schedule", ["fused", pytest.param("gpipe", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("gather", ["tick", "step"])
@pytest.mark.parametrize(
  "make",
  [_with_experts, pytest.param(_of_all_kinds, marks=pytest.mark.slow)],
)
def test_weights_travel_in_the_dtype_of_their_products(make, schedule, gather):
  """And their gradients in float32, which autodiff would not see to."""
  config = make(
    dict(fsdp=2, expert=2),
    dtype="bfloat16",
    pipeline=dict(schedule=schedule, gather=gather),
  )
  program = jax.make_jaxpr(_pipeline(config).value_and_grad)
  all_of_it = list(jaxprs.equations(program(*_inputs(config))))
  # With gpipe, forward and backward, of which one scatters.
  loops = [
    equation
    for equation in all_of_it
    if equation.primitive.name == "scan" and jaxprs.has(equation, "ppermute")
  ]
  inside = [e for loop in loops for e in jaxprs.equations(loop.params["jaxpr"])]
  travel = {"fused": "bfloat16", "gpipe": "float32"}[schedule]
  dtypes = {"all_gather": {travel}, "reduce_scatter": {"float32"}}
  if gather == "tick":
    assert _dtypes_of_cut_weights(inside) == dtypes
  else:
    names = {equation.primitive.name for equation in inside}
    assert "ppermute" in names and not names.intersection(dtypes)
    assert _dtypes_of_cut_weights(all_of_it) == dtypes


def _dtypes_of_cut_weights(equations):
  """In which their parts go from device to device, by collective."""
  found = {"all_gather": set(), "reduce_scatter": set()}
  for equation in equations:
    name = equation.primitive.name
    # [chunks, rows, ...] once they are at their ranks; all others are matrices.
    # Of routers alone, 4 experts wide, there is a product in float32.
    if (
      name in found
      and equation.invars[0].aval.ndim > 2
      and equation.invars[0].aval.shape[-2:] != (8, 4)
    ):
      found[name].add(equation.invars[0].aval.dtype.name)
  return found


@pytest.mark.slow
def test_weights_that_travel_in_bfloat16_lose_nothing():
  """Whoever casts them, a product sees the same numbers."""
  found = []
  for mesh in (dict(fsdp=2, expert=2), dict(data=4)):
    compiled, arguments = _compiled(_of_all_kinds(mesh, dtype="bfloat16"))
    found.append(jax.device_get(_call(compiled, arguments)))
  _assert_equal(*found, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["naive", "cached"])
@pytest.mark.parametrize("schedule", ["fused", "gpipe"])
def test_other_rules(rule, schedule):
  _assert_as_on_one_device(
    _config(
      (2, 2, 2, 4, 1),
      scheme="full_attnres",
      pipeline=dict(rule=rule, schedule=schedule),
    )
  )


def test_memory_does_not_grow_with_microbatches():
  temporary = []
  for microbatches in (4, 8):
    config = _config((2, 1, microbatches, 2, 1), scheme="prenorm")
    compiled, _ = _compiled(config)
    temporary.append(compiled.memory_analysis().temp_size_in_bytes)
  # The tokens themselves.
  assert temporary[1] - temporary[0] <= 4 * 4 * LENGTH * 4


@pytest.mark.slow
@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_many_shapes(shape, data):
  _assert_as_on_one_device(_config(shape, dict(data=data)))


@pytest.mark.parametrize(
  "shape",
  [
    (2, 1, 2, 2, 1),
    *(
      pytest.param(s, marks=pytest.mark.slow)
      for s in [(2, 1, 2, 4, 3), *SHAPES]
    ),
  ],
)
def test_float32(shape):
  # One copy of the smallest, whose program a test above has compiled.
  copies = dict(data=2) if shape[3] > 2 else None
  _assert_as_exact_as_one_device(_config(shape, copies))


@pytest.mark.slow
@pytest.mark.parametrize(
  "scheme", ["block_attnres", "full_attnres", "delta_attnres", "delta_block"]
)
@pytest.mark.parametrize("form", ["two_phase", "one_softmax"])
def test_forms_and_remat(scheme, form):
  config = _config(SMALL, scheme=scheme, remat="full")
  residual = dataclasses.replace(config.model.residual, form=form)
  model = dataclasses.replace(config.model, residual=residual)
  _assert_as_on_one_device(dataclasses.replace(config, model=model))


@pytest.mark.slow
def test_pairs_of_blocks():
  _assert_as_on_one_device(_config(SMALL, scheme="haares"))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("mesh", "gather"),
  [
    (dict(data=2), "tick"),
    (dict(fsdp=2, expert=2), "tick"),
    (dict(fsdp=2, expert=2), "step"),
  ],
)
def test_kinds_that_differ_from_chunk_to_chunk(mesh, gather):
  """Ten sublayers on four chunks: two or three, of up to three kinds."""
  config = _config(
    (2, 2, 2, 10, 4),
    mesh,
    last_mixer="mla",
    pipeline=dict(gather=gather),
    **tiny_network.KINDS,
  )
  _assert_as_on_one_device(config)


@pytest.mark.slow
def test_float32_with_all_kinds():
  config = _config(
    (2, 2, 2, 10, 4), dict(data=2), last_mixer="mla", **tiny_network.KINDS
  )
  _assert_as_exact_as_one_device(config)


@pytest.mark.slow
@pytest.mark.needs("libtpu")
def test_a_tpu_program():
  """The loop has only planned messages, and does not copy the cache."""
  config = _config((2, 2, 4, 4, 2), dict(data=4), dtype="bfloat16")
  config = dataclasses.replace(
    config,
    model=dataclasses.replace(config.model, width=256, mlp_width=704),
    data=dataclasses.replace(config.data, sequence_length=256),
  )
  mesh = sharding.make_mesh(config.mesh, topology.devices("v5e:2x4"))
  program = train_state.make_program(config, mesh)
  step = program.train_step.lower(program.abstract_state, program.batch_shapes)
  text, plan = step.compile().as_text(), program.network
  rule, layout = config.pipeline.rule, plan.stage.transport.layout
  per_tick = sum(layout.link_vectors(rule)) + sum(layout.link_partials())
  pairs = [pairs for _, pairs in _permutes(text)]
  assert sum(pairs) == 2 * config.mesh.data * per_tick
  program = hlo.Program(text)
  in_loop = [one for one in program.collectives() if one.in_loop]
  ticks, microbatches = plan.schedule.num_ticks, plan.microbatches
  messages = [one for one in in_loop if one.count == ticks]
  assert len(messages) == len(pairs)
  # States to the ranks that share the head, and their gradients back.
  heads = [one.count for one in in_loop if one.count != ticks]
  assert heads == [pytest.approx(microbatches)] * 2
  for one in messages:
    assert one.kind == "collective-permute" and one.overlapped
    assert {array.dims for array in one.arrays} == {(1, 256, 256)}
  slots = [plan.stage.blocks.size, plan.stage.gradients.size]
  for count, instruction, _ in program.instructions():
    if count > 1 and instruction.op in ("copy", "copy-start"):
      for array in instruction.arrays:
        assert array.dims not in [(n, 1, 256, 256) for n in slots]


def test_a_step_and_its_checkpoint(tmp_path):
  """A pipeline trains like one device, and each resumes the other's run."""
  pipelined = _config((2, 1, 2, 2, 1), scheme="prenorm", tie_embeddings=True)
  pipelined = dataclasses.replace(
    pipelined, optim=config_lib.OptimConfig(warmup_steps=1, eps=1e-2)
  )
  plain = _alone(pipelined)
  rows = pipelined.data.batch_size
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, VOCAB, (rows, LENGTH + 1), dtype=np.int32)
  segments = rng.integers(0, 3, (rows, LENGTH + 1)).cumsum(1, dtype=np.int32)
  batch = {"tokens": tokens, "segment_ids": segments}
  programs = [
    train_state.make_program(config, sharding.make_mesh(config.mesh))
    for config in (plain, pipelined)
  ]

  def moved(state, program, name):
    """Saved on one mesh and restored on another."""
    with checkpoint.Saver(
      tmp_path / name, config_lib.CheckpointConfig()
    ) as saver:
      saver.save(1, state, {"data": None})
    found = checkpoint.restore_latest(tmp_path / name, program.abstract_state)
    for a, b in zip(jax.tree.leaves(found.state), jax.tree.leaves(state)):
      np.testing.assert_array_equal(jax.device_get(a), jax.device_get(b))
    return found.state

  first = programs[0].init_state()
  states = [first, moved(first, programs[1], "to_pipeline")]
  results = []
  for program, state in zip(programs, states):
    rows = sharding.shard_batch(batch, program.mesh)
    state, metrics = program.train_step(state, rows)
    results.append((state, jax.device_get(metrics)))
  (expected, expected_metrics), (state, metrics) = results
  assert metrics.keys() == expected_metrics.keys()
  for name, value in metrics.items():
    np.testing.assert_allclose(value, expected_metrics[name], rtol=2e-5)
  for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected)):
    np.testing.assert_allclose(
      jax.device_get(a), jax.device_get(b), rtol=0, atol=2e-6
    )
  # Each rank has its share of every matrix, and of its moments.
  core = state.model.sublayers["mlp"].core.gate[...]
  assert core.addressable_shards[0].data.size * 2 == core.size
  moved(state, programs[0], "from_pipeline")


class _Growing(prenorm.PreNorm):
  """Keeps everything, and has no blocks."""

  def init(self, embedding_BTD):
    return (embedding_BTD,)

  def open(self, state, start, stop):
    return state[-1], None

  def close(self, state, carry, stop):
    return (*state, carry)

  def readout(self, state):
    return state[-1]


def test_what_does_not_fit_is_named_in_one_line(monkeypatch):
  monkeypatch.setitem(residuals.RESIDUALS, "growing", _Growing)
  # One that mesh.tensor could cut.
  monkeypatch.setitem(globals(), "LENGTH", 8)

  def refused(message, shape, mesh=None, **fields):
    optim, rows = fields.pop("optim", None), fields.pop("rows", None)
    config = _config(shape, mesh, **fields)
    if optim:
      config = dataclasses.replace(config, optim=optim)
    if rows:
      data = dataclasses.replace(config.data, batch_size=rows)
      config = dataclasses.replace(config, data=data)
    with pytest.raises(config_lib.ConfigError, match=message) as error:
      train_state.make_program(config, sharding.make_mesh(config.mesh))
    assert "\n" not in str(error.value)

  refused(
    r"^config\.pipeline\.microbatches: got 6, expected a multiple of"
    r" mesh\.stage=4, such as 4 or 8$",
    (4, 1, 6, 4, 1),
  )
  refused(r"mesh\.stage: got 4, expected at most the 2 subl", (4, 1, 4, 2, 1))
  refused(
    r"pipeline\.virtual_stages: got 3, expected at most 2, since 4 sublayers"
    r" leave some of 2 \(mesh.stage\) x 3 chunks empty$",
    (2, 3, 2, 4, 1),
  )
  refused(r"mesh\.tensor: got 2, expected 1 with", SMALL, dict(tensor=2))
  refused(
    r"model\.depth_memory: got 'moda', expected 'none' with mesh.stage=2$",
    SMALL,
    depth_memory="moda",
  )
  refused(
    r"data\.batch_size: got 12, expected a multiple of mesh.data x fsdp x"
    r" expert x pipeline.microbatches = 2 x 4, such as 8 or 16$",
    SMALL,
    dict(data=2),
    rows=12,
  )
  refused(
    r"optim\.accumulate_steps: got 2, expected 1 with mesh\.stage=2, where",
    SMALL,
    optim=config_lib.OptimConfig(accumulate_steps=2),
  )
  refused(
    r"model\.residual\.name: got 'growing', expected a scheme whose state,",
    SMALL,
    scheme="growing",
  )
