# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line of all experiments: --config, --workdir, --devices.

A field of the config is --config.<field>=<value>, and --help lists them all.
Whatever is wrong is said in one line, with the flag that was probably meant: a
word that is ignored would run another experiment than was asked for. Flags are
defined when a script is run, not when it is imported, so that notebooks may
import any number of experiments and call their `run`.
"""

from collections.abc import Sequence
import difflib
import pathlib
import re
import sys
import traceback

from absl import app
from absl import flags
from absl import logging
import jax
from ml_collections import config_flags

from experiments import config_files
from experiments.reporting import record

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_HELP = ("--help", "-help", "-h", "--h", "--helpfull", "--helpshort")


def main(run, config_file: str) -> None:
  """Parses flags and calls run(config, workdir).

  Args:
    run: of the experiment.
    config_file: the default of --config. Fields are overridden by
      --config.<field>=<value>. A config file may have a function `switch`,
      which gives the config the fields that a chosen algorithm or task has.
  """
  name, argv = _config_of(sys.argv, config_file)
  try:
    module, loaded = config_files.load(name, _ROOT, _experiment())
    overrides = _overrides(argv)
    for path, value in overrides.items():
      if hasattr(module, "switch"):
        module.switch(loaded, path, value)
  except ValueError as error:
    sys.exit(f"error: {error}")
  _check_fields(overrides, loaded)
  config = config_flags.DEFINE_config_dict(
      "config", loaded,
      "Experiment: a file of configs/, or FILE:VARIANT. The file's docstring "
      "gives question, cost and variants; a field: --config.<field>=<value>.",
      lock_config=True, sys_argv=argv,
  )
  workdir = flags.DEFINE_string(
      "workdir", None, "Where results go; runs/<config name> by default."
  )
  devices = flags.DEFINE_integer(
      "devices", None, "Devices to run on; on CPU virtual ones are made."
  )
  for flag in ("config", "workdir", "devices"):  # --help shows the script's own
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[flag])

  def parse(words):
    if any(word in _HELP for word in words):
      flags.FLAGS["config"].default_as_str = repr(name)
      app.usage(shorthelp=True, writeto_stdout=True)
      print(config_files.listing(name, module, loaded))
      sys.exit(0)
    return _parse(words, loaded)

  def start(words):
    refuse_words(words, config.value)
    if not flags.FLAGS["verbosity"].present:
      logging.set_verbosity(logging.WARNING)  # libraries tell much at INFO
    if devices.value is not None:
      if "devices" not in config.value:
        sys.exit("error: this experiment runs on one device, without --devices")
      config.value.devices = devices.value
    count = config.value.get("devices", 1)
    if count < 1:
      sys.exit(f"error: devices={count} must be at least 1")
    jax.config.update("jax_num_cpu_devices", count)
    _run(run, config.value, pathlib.Path(workdir.value or _workdir(name)))

  app.run(start, argv=argv, flags_parser=parse)


def _run(run, config, workdir: pathlib.Path) -> None:
  """Runs an experiment; errors that say what to do have no trace."""
  at = next(
      (x for x in (workdir, *workdir.parents) if x.exists()), workdir
  )
  if at.is_file():
    sys.exit(f"error: --workdir={workdir}: {at} is a file, not a folder.")
  try:
    run(config, workdir)
  except (ValueError, TypeError) as error:
    # Ours say what to do; one from elsewhere is a bug and keeps its trace.
    frame = traceback.extract_tb(error.__traceback__)[-1]
    rooms = set(pathlib.Path(frame.filename).resolve().parents)
    ours = rooms & {_ROOT / "branch_replay", _ROOT / "experiments"}
    # A call with a wrong number of arguments is a bug, too.
    if not ours or not (frame.line or "").startswith("raise"):
      raise
    sys.exit(f"error: {error}")
  except KeyboardInterrupt:
    sys.exit(130)


def without_words(main):
  """A main function of flags alone, which refuses whatever is none."""
  def start(argv):
    refuse_words(argv)
    return main(argv)

  return start


def refuse_words(argv: Sequence[str], config=None) -> None:
  """Exits with an error if flags have left words, and says what was meant."""
  for word in argv[1:]:
    meant = _meant(word, config)
    hint = f": did you mean {meant}?" if meant else ". All flags: --help."
    sys.exit(f"error: {word!r} is no flag{hint}")


def _config_of(argv: Sequence[str], default: str) -> tuple[str, list[str]]:
  """The config of a command line, and the other words of it."""
  found, rest, words = default, [], iter(argv)
  for word in words:
    if re.fullmatch("--?config", word):
      found = next(words, "")
    elif re.match("--?config=", word):
      found = word.partition("=")[2]
    else:
      rest.append(word)
  return found, rest


def _overrides(argv: Sequence[str]) -> dict[str, str]:
  """Fields that flags set, by their dotted paths."""
  found = {}
  for at, word in enumerate(argv):
    path, is_, value = word.partition("=")
    path = re.sub(r"^--?(no)?config\.", "config.", path)
    if path.startswith("config."):
      after = argv[at + 1] if at + 1 < len(argv) else ""
      found[path.removeprefix("config.")] = value if is_ else after
  return found


def _check_fields(paths: Sequence[str], config) -> None:
  """Exits with an error for a field that the config does not have."""
  for path in paths:
    at = config
    for depth, part in enumerate(path.split(".")):
      if not hasattr(at, "keys") or part not in at:
        where = ".".join(path.split(".")[:depth])
        known = list(at) if hasattr(at, "keys") else []
        if not known:
          sys.exit(f"error: the config's {where} has no fields, {path!r} asks "
                   "for one.")
        # Of the same place first, then from anywhere.
        near = difflib.get_close_matches(part, known, n=1, cutoff=0.5)
        meant = f"{where}.{near[0]}".lstrip(".") if near else ""
        if not meant:
          every = record.flat(config.to_dict())
          ends = [x for x in every if x.split(".")[-1] == path.split(".")[-1]]
          others = difflib.get_close_matches(path, every, n=1, cutoff=0.6)
          meant = next(iter([*ends, *others]), "")
        hint = f" Did you mean --config.{meant}?" if meant else (
            f" There are {', '.join(known)}."
        )
        sys.exit(f"error: the config has no field {path!r}.{hint}")
      at = at[part]


def _experiment() -> str:
  """The name of the experiment that is run, as in python -m experiments.NAME.
  """
  script = pathlib.Path(sys.argv[0])
  return script.parent.name if script.stem == "__main__" else script.stem


def _workdir(config: str) -> str:
  """runs/long_run_hybrid of configs/long_run.py:hybrid."""
  file, _, variant = config.partition(":")
  name = pathlib.Path(file).stem
  return f"runs/{name}_{variant}" if variant else f"runs/{name}"


def _meant(word: str, config) -> str:
  """The flag that a word was probably meant to be, or an empty text."""
  name, is_, value = word.partition("=")
  if config is not None and ".py" in word and not is_:
    return f"--config={word}"
  fields = [] if config is None else record.flat(config.to_dict())
  names = {f"config.{field}": f"config.{field}" for field in fields}
  names |= {field: f"config.{field}" for field in fields}
  names |= {
      flag.name: flag.name
      for module, own in flags.FLAGS.flags_by_module_dict().items()
      for flag in own if not module.startswith("absl.")
  }
  near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
  return f"--{names[near[0]]}{is_}{value}" if near else ""


def _parse(argv, config):
  """Parses flags; a wrong one is an error that says what was meant."""
  try:
    return flags.FLAGS(argv)
  except flags.UnrecognizedFlagError as error:
    word = error.flagvalue.lstrip("-")
    meant = _meant(word, config)
    hint = f" Did you mean {meant}?" if meant else " All flags: --help."
    sys.exit(f"error: there is no flag --{word}.{hint}")
  except flags.Error as error:
    sys.exit(f"error: {error}")
