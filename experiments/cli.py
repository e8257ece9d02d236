# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line of all experiments: --config, --workdir, --devices.

Flags are defined when a script is run, not when it is imported, so that
notebooks may import any number of experiments and call their `run`.
"""

import pathlib
import sys
import traceback

from absl import app
from absl import flags
from absl import logging
import jax
from ml_collections import config_flags

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
        "Experiment: a file of configs/, whose docstring gives question, cost "
        "and command; a field: --config.<field>=<value>.", lock_config=True,
    )
  except AttributeError as error:  # of a field on the command line
    if not error.args or not isinstance(error.args[0], KeyError):
      raise
    said = " ".join(error.args[0].args[0].split("\n"))
    sys.exit(f"error: the config has no field {said}")
  workdir = flags.DEFINE_string(
      "workdir", None, "Where results go; runs/<config name> by default."
  )
  devices = flags.DEFINE_integer(
      "devices", None, "Devices to run on; on CPU virtual ones are made."
  )
  for name in ("config", "workdir", "devices"):  # --help shows the script's own
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])

  def start(_):
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
    file = config_flags.get_config_filename(flags.FLAGS["config"])
    default = pathlib.Path("runs") / pathlib.Path(file).stem
    try:
      run(config.value, pathlib.Path(workdir.value or default))
    except (ValueError, TypeError) as error:
      # Ours say what to do; one from elsewhere is a bug and keeps its trace.
      raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
      rooms = set(pathlib.Path(raised_in).resolve().parents)
      if not rooms & {_ROOT / "branch_replay", _ROOT / "experiments"}:
        raise
      sys.exit(f"error: {error}")
    except KeyboardInterrupt:
      sys.exit(130)

  app.run(start)
