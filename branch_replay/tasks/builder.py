# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Turns a recipe into rows on disk, and rows on disk into a task.

Rows are written once by tensorflow-datasets, which needs no TensorFlow, and are
read in any order. They are prepared in a temporary folder that is renamed when
it is complete, so an interrupted preparation leaves nothing that could be read.
The folder's name contains a digest of everything the rows depend on.
"""

import abc
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import hashlib
import json
import pathlib
import shlex
from typing import ClassVar

import numpy as np
import tensorflow_datasets as tfds

from branch_replay import checks
from branch_replay.tasks import files
from branch_replay.tasks import splits
from branch_replay.tasks import task as task_lib
from branch_replay.tasks import text as text_lib

DEFAULT_DATA_DIR = "~/.cache/branch_replay/tasks"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(abc.ABC):
  """Settings that the rows of a task are made from; subclasses add their own.

  Attributes:
    seed: seed of the rows, and of how facts are divided among the splits.
    train: number of rows in this split.
    validation: number of rows in this split.
    test: number of rows in this split. Row i does not depend on how many rows
      there are.
  """

  name: ClassVar[str]
  rows_builder: ClassVar[type["RowsBuilder"]]
  verifiable: ClassVar[bool] = True  # see `task.Task`

  seed: int = 0
  train: int = 2048
  validation: int = 256
  test: int = 256

  def __post_init__(self):
    for field in splits.SPLITS:
      if getattr(self, field) < 1:
        raise ValueError(
            f"{field}={getattr(self, field)} rows: at least 1 is needed."
        )

  @abc.abstractmethod
  def rows(
      self, text: text_lib.Text, split: str
  ) -> Iterator[task_lib.Example]:
    """Yields the rows of a split, in order."""

  @abc.abstractmethod
  def scorer(
      self, text: text_lib.Text
  ) -> Callable[[task_lib.Example, list[int]], float]:
    """Returns the function that becomes the task's `score`."""

  def ingredients(self) -> str:
    """Text that stands for what else the rows depend on, such as documents."""
    return ""

  def row_id(self, split: str, index: int) -> str:
    """The id of a row, which never changes."""
    return f"{self.name}-{split}-{index:07d}"

  def task(self, text: text_lib.Text, rows) -> task_lib.Task:
    """A task with this recipe's reward and the given rows."""
    return task_lib.Task(
        self.name, text.vocab_size, tuple(text.stop_ids), self.scorer(text),
        rows, verifiable=self.verifiable,
    )


@dataclasses.dataclass
class Config(tfds.core.BuilderConfig):
  """A recipe and how its text becomes ids, as tensorflow-datasets wants them.
  """

  recipe: Recipe | None = None
  text: text_lib.Text | None = None


class RowsBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """Base of the tensorflow-datasets builders; subclasses set name and VERSION.

  Raise VERSION when the code makes other rows from the same settings than it
  did before.
  """

  def _info(self) -> tfds.core.DatasetInfo:
    ids = tfds.features.Tensor(shape=(None,), dtype=np.int32)
    return tfds.core.DatasetInfo(
        builder=self,
        features=tfds.features.FeaturesDict({
            "id": tfds.features.Text(),
            "prompt_ids": ids,
            "answer_ids": ids,
            "answer": tfds.features.Text(),
            "details": tfds.features.Text(),  # JSON
        }),
        disable_shuffling=True,
    )

  def _split_generators(self, dl_manager):
    del dl_manager  # nothing is downloaded
    return {name: self._generate_examples(name) for name in splits.SPLITS}

  def _generate_examples(self, split):
    recipe, text = self.builder_config.recipe, self.builder_config.text
    task = recipe.task(text, {})
    for index, example in enumerate(recipe.rows(text, split)):
      row = as_row(example)
      # Checked as it will be read, because JSON changes details.
      task_lib.check_example(task, as_example(row))
      yield index, row

  def _create_builder_config(self, builder_config, version):
    # tfds warns of configurations that the class does not list. These are
    # named after their content and cannot be listed.
    del version
    return builder_config


class SplitOnDisk(Sequence):
  """The prepared rows of one split, as a sequence of examples."""

  def __init__(self, source):
    self._source = source

  def __len__(self):
    return len(self._source)

  def __getitem__(self, index: int) -> task_lib.Example:
    return as_example(self._source[range(len(self))[index]])


def as_row(example: task_lib.Example) -> dict:
  """The row that is written for an example.

  Raises:
    ValueError: the example has `rejected_ids`, which rows on disk do not hold.
  """
  if example.rejected_ids is not None:
    raise ValueError(
        f"Example {example.id!r} has rejected_ids, which prepared rows do not "
        "hold: make a task of files, tasks.from_files."
    )
  return {
      "id": example.id,
      "prompt_ids": np.asarray(example.prompt_ids, np.int32),
      "answer_ids": np.asarray(
          [] if example.answer_ids is None else example.answer_ids, np.int32
      ),
      "answer": example.answer or "",
      "details": json.dumps(example.details, sort_keys=True),
  }


def as_example(row) -> task_lib.Example:
  """The example of a row that was read; text may be bytes."""
  id_, answer, details = (
      value.decode() if isinstance(value, bytes) else value
      for value in (row["id"], row["answer"], row["details"])
  )
  if not row["answer_ids"].size:  # none is known; a known one has a stop id
    return task_lib.Example(
        id_, row["prompt_ids"], details=json.loads(details)
    )
  return task_lib.Example(
      id_, row["prompt_ids"], row["answer_ids"], answer, json.loads(details)
  )


def digest(recipe: Recipe, text: text_lib.Text) -> str:
  """A digest that differs if recipe, vocabulary or documents differ."""
  content = json.dumps(
      (
          recipe.name, dataclasses.asdict(recipe), recipe.ingredients(),
          text.name, text.fingerprint(), text.stop_ids,
      ),
      sort_keys=True,
  )
  return hashlib.sha256(content.encode()).hexdigest()[:16]


def rows_builder(
    recipe: Recipe, text: text_lib.Text, data_dir: str | None
) -> RowsBuilder:
  """The tensorflow-datasets builder of these rows."""
  checks.instance(
      recipe, "recipe", Recipe, "tasks.recipe(name, ...) makes one."
  )
  root = pathlib.Path(data_dir or DEFAULT_DATA_DIR).expanduser().resolve()
  config = Config(
      name=f"{text.name}-{digest(recipe, text)}",
      description=repr(recipe),
      recipe=recipe,
      text=text,
  )
  return recipe.rows_builder(
      config=config, data_dir=root, file_format="array_record"
  )


def prepare(
    recipe: Recipe | files.Files,
    *,
    text: text_lib.Text = text_lib.Characters(),
    data_dir: str | None = None,
) -> task_lib.Task:
  """Loads the rows of a recipe, making them first if they are missing.

  Args:
    recipe: made by `tasks.recipe`. The rows of "file" are read from its files.
    text: how text becomes ids.
    data_dir: folder of prepared rows; ~/.cache/branch_replay/tasks by default.

  Returns:
    The task, checked.

  Raises:
    ValueError: rows cannot be made from the recipe, or `tasks.check` fails.
  """
  if isinstance(recipe, files.Files):
    return recipe.task(text)
  builder = rows_builder(recipe, text, data_dir)
  if not builder.data_path.exists():
    builder.download_and_prepare()
  return load(recipe, text=text, data_dir=data_dir)


def load(
    recipe: Recipe | files.Files,
    *,
    text: text_lib.Text = text_lib.Characters(),
    data_dir: str | None = None,
) -> task_lib.Task:
  """Loads a task whose rows were prepared before.

  Args:
    recipe: made by `tasks.recipe`.
    text: how text becomes ids.
    data_dir: folder of prepared rows; ~/.cache/branch_replay/tasks by default.

  Returns:
    The task, checked.

  Raises:
    ValueError: rows are missing (the message has the command that prepares
      them), or `tasks.check` fails.
  """
  if isinstance(recipe, files.Files):
    return recipe.task(text)
  builder = rows_builder(recipe, text, data_dir)
  if not builder.data_path.exists():
    raise ValueError(
        f"Task {recipe.name!r} with these settings has not been prepared in "
        f"{builder.data_path}. Run: {command(recipe, text, data_dir)}"
    )
  rows = {}
  for split in splits.SPLITS:
    info = builder.info.splits.get(split)
    expected = getattr(recipe, split)
    if info is None or info.num_examples != expected or not all(
        pathlib.Path(file).exists() for file in info.filepaths
    ):
      raise ValueError(
          f"{builder.data_path} does not hold the {expected} rows of {split!r}."
          f" Remove it and run: {command(recipe, text, data_dir)}"
      )
    rows[split] = SplitOnDisk(builder.as_data_source(split=split))
  task = recipe.task(text, rows)
  task_lib.check(task)
  return task


def command(
    recipe: Recipe, text: text_lib.Text, data_dir: str | None
) -> str:
  """The shell command that prepares a task.

  MODEL stands for the name or path of the model, which is not known here.
  """
  words = ["python", "-m", "experiments.prepare_tasks"]
  words.append(f"--config.task={recipe.name}")
  if isinstance(text, text_lib.Chat):
    words.append("--config.model=MODEL")
  if data_dir is not None:
    words.append(f"--config.data_dir={data_dir}")
  for field in dataclasses.fields(recipe):
    value = getattr(recipe, field.name)
    if value != field.default:
      words.append(f"--config.{recipe.name}.{field.name}={value}")
  return shlex.join(words)
