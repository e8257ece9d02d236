# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face import and export: what is read, what is refused."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from branch_replay import config as config_lib
from branch_replay.models import decoder
from branch_replay.weights import hf
from branch_replay.weights import pretrained as pretrained_lib
from branch_replay.weights import stacking

CONFIG = config_lib.ModelConfig(
    vocab_size=24, width=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, ffn_width=40, max_positions=64,
)
TIED = dataclasses.replace(CONFIG, tied_embeddings=True)
QWEN2 = dataclasses.replace(CONFIG, qkv_bias=True, rope_theta=1e6)
QWEN3 = dataclasses.replace(TIED, qk_norm=True, norm_eps=1e-6)
MOE = dataclasses.replace(
    CONFIG, qk_norm=True, experts=config_lib.Experts(3, 2, 12)
)
CONFIGS = {
    "llama": CONFIG, "tied": TIED, "qwen2": QWEN2, "qwen3": QWEN3,
    "qwen3_moe": MOE,
}


def random_params(config, seed=0):
  generator = np.random.default_rng(seed)
  shapes = jax.eval_shape(
      decoder.Decoder(config).init,
      jax.random.key(0),
      jnp.zeros((1, 1), jnp.int32),
  )["params"]
  return jax.tree.map(
      lambda leaf: jnp.asarray(
          generator.normal(size=leaf.shape), config.param_dtype
      ),
      shapes,
  )


def write(directory, config=CONFIG, *, change=None, options=None, seed=0):
  """An export whose tensors and options are then edited; returns tensors."""
  hf.save_hf(directory, config, random_params(config, seed))
  path = directory / "model.safetensors"
  tensors = safetensors_numpy.load_file(path)
  if change is not None:
    change(tensors)
    safetensors_numpy.save_file(tensors, path)
  if options is not None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))
  return tensors


def assert_bit_equal(actual, expected):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for a, b in zip(
      jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
@pytest.mark.parametrize("name", CONFIGS)
def test_export_then_import_is_bit_equal(tmp_path, name, dtype):
  config = dataclasses.replace(CONFIGS[name], param_dtype=dtype)
  params = random_params(config)
  hf.save_hf(tmp_path / "new" / "export", config, params)
  loaded = hf.load_hf(tmp_path / "new" / "export")
  assert loaded.config == config
  assert_bit_equal(loaded.params, params)
  assert json.loads((tmp_path / "new/export/config.json").read_text())[
      "torch_dtype"
  ] == dtype


def test_tensors_have_the_published_shapes(tmp_path):
  """Width 32, 4 heads of 16: q_proj is [64, 32], not [32, 32]."""
  params = random_params(QWEN3)
  hf.save_hf(tmp_path, QWEN3, params)
  tensors = safetensors_numpy.load_file(tmp_path / "model.safetensors")
  prefix = "model.layers.1.self_attn."
  assert tensors[prefix + "q_proj.weight"].shape == (64, 32)
  assert tensors[prefix + "k_proj.weight"].shape == (32, 32)
  assert tensors[prefix + "q_norm.weight"].shape == (16,)
  assert "lm_head.weight" not in tensors
  np.testing.assert_array_equal(
      tensors[prefix + "q_proj.weight"],
      params["layers"]["project"]["query"]["kernel"][1].T,
  )
  np.testing.assert_array_equal(
      tensors[prefix + "k_norm.weight"],
      params["layers"]["rotate"]["key_norm"]["scale"][1],
  )


def test_query_heads_read_their_own_kv_head(tmp_path):
  """Heads 0 and 1 read key-value head 0, heads 2 and 3 head 1."""
  config = dataclasses.replace(TIED, num_layers=1)
  name = "model.layers.0.self_attn.o_proj.weight"

  @jax.jit
  def gradient(params):
    return jax.grad(
        lambda params: jnp.sum(
            jnp.square(
                decoder.Decoder(config).apply(
                    {"params": params}, jnp.arange(6)[None]
                )
            )
        )
    )(params)["layers"]["project"]["value"]["kernel"]

  for head in range(4):

    def only_head(tensors, head=head):
      tensors[name][:, : 16 * head] = 0
      tensors[name][:, 16 * head + 16 :] = 0

    write(tmp_path, config, change=only_head)
    kernel_MKD = gradient(hf.load_hf(tmp_path).params).reshape(32, 2, 16)
    moved = np.any(np.asarray(kernel_MKD) != 0, axis=(0, 2))
    np.testing.assert_array_equal(moved, np.arange(2) == head // 2)


def test_head_and_tie_flag(tmp_path):
  """Tied or not, head in the file or not."""
  head, embedding = "lm_head.weight", "model.embed_tokens.weight"

  def add_equal(tensors):
    tensors[head] = tensors[embedding].copy()

  def add_other(tensors):
    tensors[head] = tensors[embedding] + 1

  tensors = write(tmp_path / "tied", TIED)
  assert head not in tensors
  assert "head" not in hf.load_hf(tmp_path / "tied").params
  write(tmp_path / "equal", TIED, change=add_equal)
  assert_bit_equal(
      hf.load_hf(tmp_path / "equal").params,
      hf.load_hf(tmp_path / "tied").params,
  )
  write(tmp_path / "other", TIED, change=add_other)
  with pytest.raises(ValueError, match="lm_head.weight differs from"):
    hf.load_hf(tmp_path / "other")
  tensors = write(tmp_path / "untied", CONFIG)
  np.testing.assert_array_equal(
      hf.load_hf(tmp_path / "untied").params["head"]["table"], tensors[head]
  )
  write(tmp_path / "lost", CONFIG, change=lambda t: t.pop(head))
  with pytest.raises(ValueError, match="missing lm_head.weight"):
    hf.load_hf(tmp_path / "lost")


def test_tied_gradient_is_embedding_part_plus_head_part():
  tied, untied = decoder.Decoder(TIED), decoder.Decoder(CONFIG)
  params = random_params(TIED)
  twice = params | {"head": {"table": params["embed"]["table"]}}
  tokens_GT = jnp.arange(6)[None]

  def gradient(model):
    return jax.jit(jax.grad(
        lambda p: jnp.sum(jnp.sin(model.apply({"params": p}, tokens_GT)))
    ))

  parts = gradient(untied)(twice)
  np.testing.assert_allclose(
      gradient(tied)(params)["embed"]["table"],
      parts["embed"]["table"] + parts["head"]["table"],
      rtol=1e-5, atol=1e-4,
  )


def test_missing_unexpected_and_misshapen_are_named(tmp_path):
  name = "model.layers.1.self_attn.q_proj.weight"

  def change(tensors):
    del tensors["model.norm.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((40, 32), "f4")
    tensors[name] = np.zeros((32, 32), np.float32)

  write(tmp_path, change=change)
  with pytest.raises(ValueError) as caught:
    hf.load_hf(tmp_path)
  message = str(caught.value)
  assert "missing model.norm.weight;" in message
  assert "unexpected model.layers.2.mlp.up_proj.weight;" in message
  assert f"misshapen {name} is [32, 32], expected [64, 32]" in message


def test_long_lists_of_names_are_counted(tmp_path):
  def change(tensors):
    for name in list(tensors):
      if ".layers." in name:
        del tensors[name]

  write(tmp_path, change=change)
  with pytest.raises(ValueError, match="input_layernorm.*and 10 more"):
    hf.load_hf(tmp_path)


def test_missing_biases_and_norms_are_errors(tmp_path):
  """A Qwen file without its biases or norms is not a Llama."""
  for name, config, part in (("2", QWEN2, "bias"), ("3", QWEN3, "q_norm")):
    def change(tensors, part=part):
      for key in [key for key in tensors if part in key]:
        del tensors[key]

    write(tmp_path / name, config, change=change)
    with pytest.raises(ValueError, match=f"missing .*{part}"):
      hf.load_hf(tmp_path / name)


def test_rotary_buffers_are_ignored(tmp_path):
  def change(tensors):
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, "f4")

  write(tmp_path, change=change)
  assert_bit_equal(hf.load_hf(tmp_path).params, random_params(CONFIG))


def test_damaged_files_are_named(tmp_path):
  write(tmp_path)
  path = tmp_path / "model.safetensors"
  path.write_bytes(path.read_bytes()[:-5])
  with pytest.raises(ValueError, match="model.safetensors is missing or dama"):
    hf.load_hf(tmp_path)
  path.unlink()
  with pytest.raises(ValueError, match="index.json does not exist"):
    hf.load_hf(tmp_path)
  (tmp_path / "config.json").write_text("{")
  with pytest.raises(ValueError, match="config.json is not JSON"):
    hf.load_hf(tmp_path)
  with pytest.raises(ValueError, match="nowhere/config.json does not exist"):
    hf.load_hf(tmp_path / "nowhere")


def shard(directory):
  """Splits an export into two shards; returns the index."""
  path = directory / "model.safetensors"
  tensors = safetensors_numpy.load_file(path)
  path.unlink()
  weight_map = {}
  for part in range(2):
    name = f"model-0000{part + 1}-of-00002.safetensors"
    half = dict(list(sorted(tensors.items()))[part::2])
    safetensors_numpy.save_file(half, directory / name)
    weight_map |= dict.fromkeys(half, name)
  index = {"metadata": {}, "weight_map": weight_map}
  (directory / "model.safetensors.index.json").write_text(json.dumps(index))
  return index


def test_shards(tmp_path):
  write(tmp_path)
  index = shard(tmp_path)
  assert_bit_equal(hf.load_hf(tmp_path).params, random_params(CONFIG))
  with pytest.raises(ValueError, match="sharded export"):
    hf.save_hf(tmp_path, CONFIG, random_params(CONFIG))
  first = tmp_path / "model-00001-of-00002.safetensors"
  tensors = safetensors_numpy.load_file(first)
  lost = tensors.pop("lm_head.weight")
  safetensors_numpy.save_file(tensors, first)
  with pytest.raises(ValueError, match="promises lm_head.weight"):
    hf.load_hf(tmp_path)
  second = tmp_path / "model-00002-of-00002.safetensors"
  both = safetensors_numpy.load_file(second)
  safetensors_numpy.save_file(tensors | {"lm_head.weight": lost}, first)
  safetensors_numpy.save_file(both | {"lm_head.weight": lost}, second)
  with pytest.raises(ValueError, match="lm_head.weight is in two shards"):
    hf.load_hf(tmp_path)
  second.unlink()
  with pytest.raises(ValueError, match="model-00002.*missing or damaged"):
    hf.load_hf(tmp_path)
  del index["weight_map"]
  (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
  with pytest.raises(ValueError, match="no weight_map"):
    hf.load_hf(tmp_path)


def test_a_single_file_beside_shards_is_refused(tmp_path):
  """Either could be the stray one, so neither is read for the other."""
  write(tmp_path)
  single = (tmp_path / "model.safetensors").read_bytes()
  shard(tmp_path)
  hf.load_hf(tmp_path)
  (tmp_path / "model.safetensors").write_bytes(single)
  with pytest.raises(ValueError, match="two sets of weights: delete the one"):
    hf.load_hf(tmp_path)


def test_dtypes(tmp_path):
  write(tmp_path)
  cast = hf.load_hf(tmp_path, param_dtype="bfloat16", compute_dtype="bfloat16")
  assert {leaf.dtype for leaf in jax.tree.leaves(cast.params)} == {
      jnp.dtype("bfloat16")
  }
  assert cast.config.compute_dtype == "bfloat16"

  def large(tensors):
    tensors["model.norm.weight"][3] = 1e5

  write(tmp_path, change=large)
  with pytest.raises(ValueError, match="model.norm.weight holds 1000.*float16"):
    hf.load_hf(tmp_path, param_dtype="float16")
  with pytest.raises(ValueError, match="jax_enable_x64"):
    with jax.enable_x64(False):
      hf.load_hf(tmp_path, param_dtype="float64")

  def quantise(tensors):
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].astype(np.int8)

  write(tmp_path, change=quantise)
  with pytest.raises(ValueError, match="up_proj.weight is stored as I8"):
    hf.load_hf(tmp_path)


def test_a_failed_save_leaves_the_earlier_export(tmp_path, monkeypatch):
  write(tmp_path)
  before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
  other = random_params(CONFIG, seed=1)

  def fail(tensors, path, metadata):
    del tensors, metadata
    path.write_bytes(b"half a fi")
    raise OSError("No space left on device")

  with monkeypatch.context() as patch:
    patch.setattr(safetensors_numpy, "save_file", fail)
    with pytest.raises(OSError, match="No space"):
      hf.save_hf(tmp_path, CONFIG, other)
  assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
  hf.save_hf(tmp_path, CONFIG, other)
  assert_bit_equal(hf.load_hf(tmp_path).params, other)


def test_a_tree_of_another_config_is_refused(tmp_path):
  with pytest.raises(ValueError, match="missing head/table"):
    hf.save_hf(tmp_path / "a", CONFIG, random_params(TIED))
  other = random_params(dataclasses.replace(CONFIG, num_layers=3))
  with pytest.raises(ValueError, match=r"is \[3, .*expected \[2, "):
    hf.save_hf(tmp_path / "a", CONFIG, other)
  assert not (tmp_path / "a").exists()


def test_ids_past_the_embedding_are_refused(tmp_path):
  params = random_params(CONFIG)
  with pytest.raises(ValueError, match="stop id 24 is outside.*24 rows"):
    hf.save_hf(tmp_path, CONFIG, params, stop_ids=(2, 24))
  model = decoder.Decoder(CONFIG)
  with pytest.raises(ValueError, match="bos id -1"):
    pretrained_lib.Pretrained(model, params, bos_id=-1)


def test_ids_of_the_files_without_a_tokenizer(tmp_path):
  write(tmp_path, options={"eos_token_id": 7, "bos_token_id": 6})
  bare = hf.load_hf(tmp_path)
  assert (bare.stop_ids, bare.bos_id, bare.tokenizer) == ((7,), 6, None)
  assert (bare.end_of_turn, bare.chat_template) == (7, None)
  (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 7]}')
  loaded = hf.load_hf(tmp_path)
  assert (loaded.stop_ids, loaded.bos_id) == ((8, 7), 6)


def test_names_cover_every_parameter():
  both = dataclasses.replace(CONFIG, qk_norm=True, qkv_bias=True)
  paths = {
      slot.path for slot in stacking.slots(both, stacking.GGUF_NAMES).values()
  }
  assert paths == stacking.GGUF_NAMES.keys()
  every = dataclasses.replace(
      both, num_layers=4, layer_pattern=("delta", "latent", "sliding", "full"),
      window=4, delta=config_lib.GatedDelta(2, 4, 8, 12),
      latent=config_lib.LatentAttention(12, 8, 4, 10, query_rank=9),
      output_gate=True, post_norms=True,
  )
  shared = config_lib.Experts(
      3, 2, 12, shared_width=4, shared_gate=True, correction=True
  )
  names = {
      *stacking.slots(every, stacking.HF_NAMES),
      *stacking.slots(
          dataclasses.replace(MOE, experts=shared), stacking.HF_NAMES
      ),
  }
  templates = {
      re.sub(r"(layers|experts)\.\d", r"\1.{}", name) for name in names
  }
  assert templates == set(stacking.HF_NAMES.values())
  with pytest.raises(ValueError, match="output_gate.* has no place in files"):
    stacking.slots(
        dataclasses.replace(CONFIG, output_gate=True), stacking.GGUF_NAMES
    )
