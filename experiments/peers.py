# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""One policy gradient by several systems: time, memory, and the same result.

Every system runs in a process of its own, on the same threads, from the same
weights and tokens; for each prompt length the processes are fresh. They are
timed in rounds, every system once a round in a random order, and wait for their
turn without spinning. At the end of a prompt length the gradients of the exact
systems are compared parameter by parameter.

  python -m experiments.peers --prefixes=1024 --peers=ours,prefix_grouper

Writes peers.json and peers.png to the workdir. peers.json is rewritten as
results come; prompt lengths that it holds in full are not run again.
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
from branch_replay import flops
from experiments import cli
from experiments import peers_report
from experiments import record
from experiments.peer_workers import problem as problem_lib
from experiments.peer_workers import session as session_lib

_ROOT = pathlib.Path(__file__).resolve().parent.parent


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
  model = br.ModelConfig(**config.model)
  return flops.gradient(
      model, prefix=prompt, branches=config.branches, tail=config.tail_tokens,
      mode=session_lib.MODES[name], policy="keep",
  )


def foreseen(config, name: str, prompt: int, entries: list[dict]) -> str | None:
  """Why a system is not tried on a prompt, or None.

  Args:
    config: see configs/peers.py.
    name: the system.
    prompt: prompt tokens.
    entries: of prompts that have been run.

  Returns:
    A reason for the record.
  """
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
  """Results that are there, or empty ones.

  Raises:
    ValueError: the file holds results of another config.
  """
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


def _complete(config, entry: dict) -> bool:
  there = {row["peer"] for row in entry["peers"]}
  return bool(entry.get("finished")) and there >= set(config.peers)


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict:
  """Runs the prompt lengths that are not finished; see the module.

  Args:
    config: configs/peers.py.
    workdir: takes peers.json and peers.png.

  Returns:
    What peers.json holds.

  Raises:
    ValueError: a config that cannot be run, before anything is; results of
      another config; or, when everything is written, systems that should agree
      and do not.
  """
  file = pathlib.Path(workdir).resolve() / "peers.json"
  config = ml_collections.ConfigDict(config.to_dict())
  config.peers = chosen(config.peers)
  if config.repeats < 1:
    raise ValueError(f"repeats={config.repeats}: measure at least once.")
  br.ModelConfig(**config.model)
  foreign = [name for name in config.peers if not name.startswith("ours_")]
  if foreign and not (_ROOT / config.peers_python).exists():
    raise ValueError(
        f"peers_python={config.peers_python} does not exist: build it with "
        "`make .venv-peers/.ready`, or choose --peers=ours."
    )
  results = _resume(config, file)
  entries = results["prefixes"]

  def save():
    for entry in entries:
      peers_report.relate(entry)
    record.write_json(file, results)

  waiting = [
      prompt for prompt in sorted(set(config.prefixes))
      if not any(
          entry["prompt_tokens"] == prompt and _complete(config, entry)
          for entry in entries
      )
  ]
  steps = len(waiting) * (len(config.peers) + config.repeats)
  with tqdm.tqdm(total=steps, unit="step") as bar:
    for prompt in waiting:
      entries[:] = [e for e in entries if e["prompt_tokens"] != prompt]
      entries.append({
          "prompt_tokens": prompt,
          "branches": config.branches,
          "tail_tokens": config.tail_tokens,
          "environment": record.environment(),
          "load_average_before": os.getloadavg()[0],
          "finished": False,
          "peers": [],
      })
      entries.sort(key=lambda entry: entry["prompt_tokens"])
      entry = next(e for e in entries if e["prompt_tokens"] == prompt)
      measure(config, entry, entries, save, bar)
  peers_report.draw(results, file.with_suffix(".png"))
  print(peers_report.table(results))
  print(f"Wrote {file} and peers.png beside it.")
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


def _command_line():
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


if __name__ == "__main__":
  _command_line()
