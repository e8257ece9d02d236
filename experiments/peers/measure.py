# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""One policy gradient by several systems: time, memory, and the same result.

Every system runs in a process of its own, on the same threads, from the same
weights and tokens; for each prompt length the processes are fresh. They are
timed in rounds, every system once a round in a random order, and wait for their
turn without spinning. At the end of a prompt length the gradients of the exact
systems are compared parameter by parameter.

  python -m experiments.peers --prefixes=1024 --peers=ours,prefix_grouper

results.json in the workdir is rewritten as results come; prompt lengths that it
holds in full are not run again.
"""

import json
import os
import pathlib
import random
import tempfile

from absl import flags
import ml_collections
import tqdm

import branch_replay as br
from branch_replay.planning import flops
from experiments import cli
from experiments.peers import problem as problem_lib
from experiments.peers import report
from experiments.peers import session as session_lib
from experiments.reporting import record
from experiments.reporting import timing

_ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def chosen(names) -> tuple[str, ...]:
  """Names of systems, "ours" standing for all of ours.

  Raises:
    ValueError: an unknown name, or no name.
  """
  known = list(session_lib.MODES)
  unknown = [name for name in names if name not in ("ours", *known)]
  if unknown or not names:
    raise ValueError(
        f"peers={tuple(names)}: name one or more of ours, {', '.join(known)}."
    )
  return tuple(
      name for name in known
      if name in names or ("ours" in names and name.startswith("ours_"))
  )


def work(config, name: str, prompt: int) -> int:
  """Analytic FLOPs of one gradient by a system."""
  return flops.gradient(
      br.ModelConfig(**config.model), prefix=prompt, branches=config.branches,
      tail=config.tail_tokens, mode=session_lib.MODES[name], policy="keep",
  )


def foreseen(config, name: str, prompt: int, entries: list[dict]) -> str | None:
  """Why a system is not tried on a prompt, from shorter ones; or None."""
  if name == "ours_full" and prompt > config.ours_full_up_to:
    return f"run up to {config.ours_full_up_to} prompt tokens"
  before = [
      (entry["prompt_tokens"], row)
      for entry in entries if entry["prompt_tokens"] < prompt
      for row in entry["peers"] if row["peer"] == name
  ]
  if not before:
    return None
  shorter, row = max(before, key=lambda found: found[0])
  if "not_run" in row:
    return f"not run on {shorter} prompt tokens: {row['not_run']}"
  growth = work(config, name, prompt) / work(config, name, shorter)
  seconds = row["seconds_median"] * growth
  if seconds > config.limit_seconds:
    return (
        f"one gradient would take {seconds:.0f} s, by FLOPs from "
        f"{row['seconds_median']:.0f} s at {shorter}; the limit is "
        f"{config.limit_seconds:.0f} s"
    )
  return None


def measure(config, entry: dict, entries: list[dict], save, bar) -> None:
  """Everything on one prompt length, into its entry.

  Args:
    config: see configs/peers.py.
    entry: has the shape; filled in.
    entries: all of them, to foresee what cannot be run.
    save: called when there is something new.
    bar: progress.
  """
  prompt = entry["prompt_tokens"]
  for name in config.peers:
    row = {"peer": name, "mode": session_lib.MODES[name], "seconds": []}
    reason = foreseen(config, name, prompt, entries)
    entry["peers"].append(row | ({"not_run": reason} if reason else {}))
  with tempfile.TemporaryDirectory() as folder:
    session = session_lib.Session(config, entry, pathlib.Path(folder))
    file = session.folder / "problem.npz"
    problem_lib.save(
        problem_lib.create(
            config.model.to_dict(), prompt=prompt, branches=config.branches,
            tail=config.tail_tokens, seed=config.seed,
        ),
        file,
    )
    try:
      for name in config.peers:
        bar.set_description(f"P={prompt} {name}: first gradient")
        if "not_run" not in session.row(name):
          session.start(name, file)
        bar.update()
        save()
      order = random.Random(config.seed)
      for turn in range(config.repeats):
        names = [
            name for name in session.workers
            if turn == 0 or not session.slow(name)
        ]
        for name in order.sample(names, len(names)):
          bar.set_description(f"P={prompt} {name}: round {turn + 1}")
          session.go(name, 2 * config.limit_seconds)
          save()
        bar.update()
      bar.set_description(f"P={prompt}: comparing gradients")
      session.check()
    finally:
      session.close()
  entry["load_average_after"] = os.getloadavg()[0]
  entry["finished"] = True
  save()


def _resume(config, file: pathlib.Path) -> dict:
  """Results that are there, or empty ones; ValueError for another config."""
  mine = json.loads(json.dumps(config.to_dict()))
  for field in ("peers", "prefixes", "peers_python"):
    del mine[field]
  if not file.exists():
    return {"config": mine, "prefixes": []}
  results = json.loads(file.read_text())
  differ = record.differences(results["config"], mine)
  if differ:
    raise ValueError(
        f"{file} holds results of another config: {'; '.join(differ)}. Take "
        "another --workdir, or move it away."
    )
  return results


def _checked(config) -> ml_collections.ConfigDict:
  """The config with names spelled out, or a ValueError."""
  config = ml_collections.ConfigDict(config.to_dict())
  config.peers = chosen(config.peers)
  timing.check(config.repeats)
  br.ModelConfig(**config.model)
  foreign = [name for name in config.peers if not name.startswith("ours_")]
  if foreign and not (_ROOT / config.peers_python).exists():
    raise ValueError(
        f"peers_python={config.peers_python} does not exist: build it with "
        "`make .venv-peers/.ready`, or choose --peers=ours."
    )
  return config


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict:
  """Runs the prompt lengths that are not finished.

  Raises:
    ValueError: a config that cannot be run, before anything is; results of
      another config; or, when everything is written, systems that should agree
      and do not.
  """
  workdir = pathlib.Path(workdir).resolve()
  config = _checked(config)
  results = _resume(config, workdir / "results.json")
  entries = results["prefixes"]
  complete = {
      entry["prompt_tokens"] for entry in entries
      if entry.get("finished")
      and {row["peer"] for row in entry["peers"]} >= set(config.peers)
  }
  waiting = sorted(set(config.prefixes) - complete)

  def save():
    for entry in entries:
      report.relate(entry)
    record.save(workdir, results)

  steps = len(waiting) * (len(config.peers) + config.repeats)
  with tqdm.tqdm(total=steps, unit="step") as bar:
    for prompt in waiting:
      entry = {
          "prompt_tokens": prompt, "branches": config.branches,
          "tail_tokens": config.tail_tokens,
          "environment": record.environment(),
          "load_average_before": os.getloadavg()[0], "finished": False,
          "peers": [],
      }
      entries[:] = [e for e in entries if e["prompt_tokens"] != prompt]
      entries.append(entry)
      entries.sort(key=lambda entry: entry["prompt_tokens"])
      measure(config, entry, entries, save, bar)
  record.finish(workdir, results, table=report.table, draw=report.draw)
  print("\n".join(report.remarks(results)))
  differ = [
      f"{row['peer']} at {entry['prompt_tokens']}"
      for entry in entries for row in entry["peers"]
      if row.get("agrees") is False
  ]
  if differ:
    raise ValueError(
        f"Other gradients than {config.tolerance:g} allows, so the times are "
        f"not comparable: {', '.join(differ)}."
    )
  return results


def main():
  """--peers and --prefixes beside the flags of `cli`."""
  peers = flags.DEFINE_list("peers", None, "Systems to run; ours: all of ours.")
  prefixes = flags.DEFINE_list("prefixes", None, "Prompt lengths, in tokens.")

  def narrowed(config, workdir):
    if peers.value is not None:
      config.peers = tuple(peers.value)
    if prefixes.value is not None:
      if not all(word.isdigit() for word in prefixes.value):
        raise ValueError(f"--prefixes={prefixes.value}: whole numbers.")
      config.prefixes = tuple(map(int, prefixes.value))
    return run(config, workdir)

  cli.main(narrowed, "configs/peers.py")
