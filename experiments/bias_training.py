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
import matplotlib
import ml_collections
import numpy as np
import optax
import tokenizers
import tqdm

import branch_replay as br
from branch_replay.weights import pretrained as pretrained_lib
from branch_replay.weights import tokenizer as tokenizer_lib
from experiments import bias_report
from experiments import bias_sweep
from experiments import cli
from experiments import record

_MATRICES = {
    name: f"layers/project/{name}/kernel" for name in ("query", "key", "value")
}


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
  sixteenths = np.asarray(profile).reshape(16, -1).sum(axis=1)
  return {
      "first": float(sixteenths[0]),
      "last": float(sixteenths[-1]),
      "two_largest": float(np.sort(sixteenths)[-2:].sum()),
  }


def measure(config, pretrained, texts, parts) -> dict:
  """The bias study of the config's groups, on these parameters.

  Args:
    config: configs/bias_training.py.
    pretrained: model, parameters and tokenizer.
    texts: that prompts are taken from.
    parts: compiled pieces.

  Returns:
    Means and spreads over the groups: "stop" and "estimators" as
    `bias_report.summarize` gives them, and "shares" of both profiles.
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
  summary = bias_report.summarize(studied)
  found = {
      profile: [shares(case[profile]) for case in studied]
      for profile in ("profile", "profile_tails")
  }
  return {
      "stop": summary["stop"][0],
      "estimators": summary["estimators"],
      "shares": {
          profile: {
              part: bias_report.spread([one[part] for one in members])
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
  model = br.Decoder(br.ModelConfig(**config.model))
  optimizer = optimizer_of(config)
  tokenizer = byte_tokenizer()
  texts = bias_sweep.documents()[: config.documents]
  learned, held = split(texts, config.held_out)
  stream_S, held_S = ids_of(tokenizer, learned), ids_of(tokenizer, held)
  validation_GT = windows(
      held_S,
      np.linspace(0, len(held_S) - config.tokens - 1, config.validation_windows)
      .astype(int),
      config.tokens,
  )
  key = jax.random.key(seed)
  params = model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
  moments = optimizer.init(params)
  size = -(-(config.prompt_tokens - 1) // config.chunks)
  parts = bias_sweep.Study(
      model, br.Schedule(chunk_size=size, activations="keep")
  )
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
  """Trains every model and measures as it goes; see the module.

  Args:
    config: configs/bias_training.py.
    workdir: where results.json and bias_training.png go.

  Returns:
    What results.json holds.

  Raises:
    ValueError: a config that cannot be run, before anything is trained.
  """
  workdir = pathlib.Path(workdir).resolve()
  _check(config)
  model_config = br.ModelConfig(**config.model)
  if (workdir / "results.json").exists():
    print(f"{workdir / 'results.json'} is of an earlier run, whose models are "
          "not kept: starting anew, it will be overwritten.")
  results = {
      "environment": record.environment(), "config": config.to_dict(),
      "model": dataclasses.asdict(model_config), "records": [],
  }
  total = config.train_seeds * max(config.steps)
  with tqdm.tqdm(total=total, unit="step") as bar:
    for seed in range(config.train_seeds):
      for row in train(config, seed, bar):
        results["records"].append(row)
        record.write_json(workdir / "results.json", results)
  results["environment"]["peak_rss_bytes"] = record.peak_rss_bytes()
  record.write_json(workdir / "results.json", results)
  draw(results, workdir / "bias_training.png")
  print(table(results))
  print(f"Wrote {workdir / 'results.json'} and bias_training.png beside it.")
  return results


def _matrix(row: dict, name: str) -> float:
  return row["stop"]["per_matrix_cosine"][_MATRICES[name]]["mean"]


def table(results: dict) -> str:
  """Distance of stop and shares of the cotangent by step, as text."""
  lines = [
      "seed  step  validation  cosine  rel. error  norm ratio  key  value  "
      "first, last, two largest sixteenths"
  ]
  for row in results["records"]:
    stop, share = row["stop"], row["shares"]["profile"]
    lines.append(
        f"{row['train_seed']}  {row['step']:5d}  {row['validation_loss']:.3f}  "
        f"{stop['cosine']['mean']:.3f} ± {stop['cosine']['std'] or 0:.3f}  "
        f"{stop['relative_error']['mean']:.3f}  "
        f"{stop['norm_ratio']['mean']:.3f}  {_matrix(row, 'key'):.3f}  "
        f"{_matrix(row, 'value'):.3f}  "
        + "  ".join(f"{part['mean']:.3f}" for part in share.values())
    )
  return "\n".join(lines)


def draw(results: dict, path: pathlib.Path) -> None:
  """Writes a figure: loss, distance of stop, matrices, cotangent, by step."""
  matplotlib.use("Agg")
  from matplotlib import pyplot as plt  # after the backend is chosen

  figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
  panels = {
      "validation loss, nats a byte": {
          "validation": lambda row: row["validation_loss"],
      },
      "stop against exact, mean over groups": {
          measure: lambda row, measure=measure: row["stop"][measure]["mean"]
          for measure in ("cosine", "relative_error", "norm_ratio",
                          "adam_cosine")
      },
      "cosine of stop with exact, by matrix": {
          name: lambda row, name=name: _matrix(row, name)
          for name in _MATRICES
      },
      "share of the squared cotangent, sixteenths of the prefix": {
          part: lambda row, part=part: row["shares"]["profile"][part]["mean"]
          for part in ("first", "last", "two_largest")
      },
  }
  seeds = sorted({row["train_seed"] for row in results["records"]})
  for axis, (title, lines) in zip(axes.flat, panels.items(), strict=True):
    for color, (name, value) in enumerate(lines.items()):
      for seed in seeds:
        rows = [r for r in results["records"] if r["train_seed"] == seed]
        axis.plot(
            [row["step"] for row in rows], [value(row) for row in rows],
            marker="o", color=f"C{color}", alpha=0.7,
            label=name if seed == seeds[0] else None,
        )
    axis.set_xscale("symlog", linthresh=30)
    axis.set_xticks(results["config"]["steps"], results["config"]["steps"])
    axis.set_xlabel("training step (a line a training seed)")
    axis.set_title(title, fontsize=10)
    axis.legend(fontsize=8)
  figure.savefig(path, dpi=120)
  plt.close(figure)


if __name__ == "__main__":
  cli.main(run, "configs/bias_training.py")
