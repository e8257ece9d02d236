# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line of all experiments: --config, --workdir, --devices.

A word that is no flag is refused, with the flag that was probably meant:
ignored, it would run another experiment than was asked for. Flags are defined
when a script is run, not when it is imported, so that notebooks may import any
number of experiments and call their `run`.
"""

from collections.abc import Sequence
import difflib
import pathlib
import sys
import traceback

from absl import app
from absl import flags
from absl import logging
import jax
from ml_collections import config_flags

from experiments.reporting import record

_ROOT = pathlib.Path(__file__).resolve().parent.parent


def main(run, config_file: str) -> None:
  """Parses flags and calls run(config, workdir).

  Args:
    run: of the experiment.
    config_file: the default of --config. Fields are overridden by
      --config.<field>=<value>.
  """
  try:
    config = config_flags.DEFINE_config_file(
        "config", str(_ROOT / config_file),
        "Experiment: a file of configs/, or FILE:VARIANT. The file's docstring "
        "gives question, cost and variants; a field: --config.<field>=<value>.",
        lock_config=True,
    )
  except AttributeError as error:  # of a field on the command line
    if not error.args or not isinstance(error.args[0], KeyError):
      raise
    sys.exit(_no_field(error))
  except ValueError as error:
    sys.exit(_last_line(error))
  workdir = flags.DEFINE_string(
      "workdir", None, "Where results go; runs/<config name> by default."
  )
  devices = flags.DEFINE_integer(
      "devices", None, "Devices to run on; on CPU virtual ones are made."
  )
  for name in ("config", "workdir", "devices"):  # --help shows the script's own
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])

  def start(argv):
    refuse_words(argv, _loaded(config))
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
    try:
      run(config.value, pathlib.Path(workdir.value or _default_workdir()))
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

  app.run(start, flags_parser=_parse)


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


def _default_workdir() -> pathlib.Path:
  """runs/long_run_hybrid of configs/long_run.py:hybrid."""
  file, _, variant = flags.FLAGS["config"].config_filename.partition(":")
  name = pathlib.Path(file).stem
  return pathlib.Path("runs") / (f"{name}_{variant}" if variant else name)


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


def _parse(argv):
  """Parses flags; a wrong one is an error that says what was meant."""
  try:
    return flags.FLAGS(argv)
  except AttributeError as error:
    sys.exit(_no_field(error))
  except flags.UnrecognizedFlagError as error:
    word = error.flagvalue.lstrip("-")
    meant = _meant(word, flags.FLAGS["config"].value)
    if meant and "Did you mean" not in str(error):
      sys.exit(f"error: there is no flag --{word}. Did you mean: {meant}")
    return app.parse_flags_with_usage(argv)
  except flags.Error as error:
    if "Unknown variant" in str(error):
      sys.exit(_last_line(error))
    return app.parse_flags_with_usage(argv)


def _last_line(error: Exception) -> str:
  """The message in the trace that the config flag makes of an error."""
  return f"error: {str(error).strip().splitlines()[-1].partition(': ')[2]}"


def _no_field(error: AttributeError) -> str:
  said = error.args[0].args[0] if isinstance(error.args[0], KeyError) else (
      str(error)
  )
  return "error: the config has no field " + " ".join(said.split("\n"))


def _loaded(config):
  """The config of a flag; exits with an error if its file is not there."""
  try:
    config.value.keys()  # of a file that failed to load, an error
    return config.value
  except OSError as error:
    file = flags.FLAGS["config"].config_filename.partition(":")[0]
    if pathlib.Path(file).exists():
      raise
    files = [f"configs/{x.name}" for x in (_ROOT / "configs").glob("*.py")]
    near = difflib.get_close_matches(file, files, n=1, cutoff=0.6)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise SystemExit(f"error: there is no config {file}.{hint}") from error
