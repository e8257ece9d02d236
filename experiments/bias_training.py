# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The bias of stopping at the prefix, while a model is trained from scratch.

A byte-level model learns to predict the next byte of the bias study's
documents, but for the end of each, which is held out. At some steps the bias
study is run on the parameters of that moment, on prompts of the held-out text
and answers that the model samples; the groups' prompts and advantages are the
same at every step.

results.json is rewritten at every such step. A run that was interrupted starts
anew, and says so.

  python -m experiments.bias_training --config=configs/bias_training.py
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import tokenizers
import tqdm

import branch_replay as br
from branch_replay.weights import load
from branch_replay.weights import pretrained as pretrained_lib
from branch_replay.weights import tokenizer as tokenizer_lib
from experiments import bias_sweep
from experiments import cli
from experiments import prompts
from experiments.reporting import bias
from experiments.reporting import record
from experiments.reporting import tables


def byte_tokenizer() -> tokenizers.Tokenizer:
  """256 ids, one a byte of UTF-8."""
  # The alphabet comes in another order in every process.
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(
      vocab={byte: id_ for id_, byte in enumerate(alphabet)}, merges=[]
  ))
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
      add_prefix_space=False
  )
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  return tokenizer_lib.wrapped(tokenizer)


def split(texts: list[str], held_out: float) -> tuple[list[str], list[str]]:
  """The beginning of every text, and its end, a share `held_out`."""
  cuts = [round(len(text) * (1 - held_out)) for text in texts]
  return (
      [text[:cut] for text, cut in zip(texts, cuts, strict=True)],
      [text[cut:] for text, cut in zip(texts, cuts, strict=True)],
  )


def ids_of(tokenizer, texts: list[str]) -> np.ndarray:
  """All texts as one stream of ids, [S]."""
  return np.concatenate([tokenizer.encode(text) for text in texts])


def windows(stream_S, starts_G, tokens: int) -> jax.Array:
  """i32[G, tokens + 1]: inputs, and the targets one further."""
  at_GT = np.asarray(starts_G)[:, None] + np.arange(tokens + 1)
  return jnp.asarray(stream_S[at_GT], jnp.int32)


def next_token_loss(model: br.Decoder, params, tokens_GT):
  """Mean −log p of every token but the first, in nats."""
  logits_GTV = model.apply({"params": params}, tokens_GT[:, :-1])
  return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(
      logits_GTV, tokens_GT[:, 1:]
  ))


def optimizer_of(config) -> optax.GradientTransformation:
  """AdamW, warmed up and then along a cosine to a tenth."""
  return optax.adamw(
      optax.warmup_cosine_decay_schedule(
          0.0, config.learning_rate, config.warmup_steps,
          decay_steps=max(config.steps), end_value=config.learning_rate / 10,
      ),
      weight_decay=config.weight_decay,
  )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def _update(model, optimizer, params, moments, tokens_GT):
  gradient = jax.grad(
      lambda params: next_token_loss(model, params, tokens_GT)
  )(params)
  updates, moments = optimizer.update(gradient, moments, params)
  return optax.apply_updates(params, updates), moments


_validate = jax.jit(next_token_loss, static_argnums=0)


def shares(profile: list[float]) -> dict:
  """Shares of the squared cotangent in sixteenths of the prefix."""
  sixteenths = bias.sixteenths(profile)
  return {
      "first": float(sixteenths[0]), "last": float(sixteenths[-1]),
      "two_largest": float(np.sort(sixteenths)[-2:].sum()),
  }


def measure(config, pretrained, texts, parts) -> dict:
  """The bias study of the config's groups, on these parameters.

  Returns:
    Means and spreads over the groups: "stop" and "estimators" as
    `bias.summarize` gives them, and "shares" of both profiles.
  """
  shape = config.prompt_tokens, config.tail_tokens, config.branches
  studied = [
      bias_sweep.study(
          config, pretrained,
          bias_sweep.Case(document, seed, *shape, config.advantages),
          texts, parts,
      )
      for seed in range(config.seeds)
      for document in range(config.documents)
  ]
  summary = bias.summarize(studied)
  found = {
      profile: [shares(case[profile]) for case in studied]
      for profile in ("profile", "profile_tails")
  }
  return {
      "stop": summary["stop"][0],
      "estimators": summary["estimators"],
      "shares": {
          profile: {
              part: tables.spread([one[part] for one in members])
              for part in members[0]
          }
          for profile, members in found.items()
      },
  }


def _check(config):
  steps = list(config.steps)
  if steps != sorted(set(steps)) or steps[0] < 0:
    raise ValueError(f"steps={config.steps} must ascend from 0 or later.")
  if config.advantages != "random":
    raise ValueError(
        f"advantages={config.advantages!r}: only 'random' keeps the groups "
        "comparable from step to step."
    )
  if config.prompt_tokens < 16 * config.chunks:
    raise ValueError(
        f"prompt_tokens={config.prompt_tokens} is too short for chunks="
        f"{config.chunks}: take 16 tokens a chunk."
    )


def train(config, seed: int, bar):
  """Trains one model; yields a record at every step that is measured."""
  model, params = load.random(br.ModelConfig(**config.model), seed)
  optimizer = optimizer_of(config)
  tokenizer = byte_tokenizer()
  texts = prompts.texts()[: config.documents]
  learned, held = split(texts, config.held_out)
  stream_S, held_S = ids_of(tokenizer, learned), ids_of(tokenizer, held)
  validation_GT = windows(
      held_S,
      np.linspace(0, len(held_S) - config.tokens - 1, config.validation_windows)
      .astype(int),
      config.tokens,
  )
  key = jax.random.key(seed)
  moments = optimizer.init(params)
  parts = bias_sweep.study_of(model, config.prompt_tokens, config.chunks)
  for step in range(max(config.steps) + 1):
    if step in config.steps:
      bar.set_description(f"seed {seed}, step {step}: measuring")
      pretrained = pretrained_lib.Pretrained(model, params, tokenizer)
      yield {
          "train_seed": seed, "step": step,
          "validation_loss": float(_validate(model, params, validation_GT)),
          **measure(config, pretrained, held, parts),
      }
      bar.set_description(f"seed {seed}: training")
    if step == max(config.steps):
      return
    starts_G = jax.random.randint(
        jax.random.fold_in(key, step), (config.batch,), 0,
        len(stream_S) - config.tokens,
    )
    params, moments = _update(
        model, optimizer, params, moments,
        windows(stream_S, starts_G, config.tokens),
    )
    bar.update()


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict:
  """Trains every model and measures as it goes.

  Raises:
    ValueError: a config that cannot be run, before anything is trained.
  """
  workdir = pathlib.Path(workdir).resolve()
  _check(config)
  model_config = br.ModelConfig(**config.model)
  if (workdir / "results.json").exists():
    print(f"{workdir / 'results.json'} is of an earlier run, whose models are "
          "not kept: starting anew, it will be overwritten.")
  results = record.begin(
      config, model=dataclasses.asdict(model_config), records=[]
  )
  total = config.train_seeds * max(config.steps)
  with tqdm.tqdm(total=total, unit="step") as bar:
    for seed in range(config.train_seeds):
      for row in train(config, seed, bar):
        results["records"].append(row)
        record.save(workdir, results)
  results["environment"]["peak_rss_bytes"] = record.peak_rss_bytes()
  return record.finish(
      workdir, results, table=bias.training, draw=bias.draw_training
  )


if __name__ == "__main__":
  cli.main(run, "configs/bias_training.py")
