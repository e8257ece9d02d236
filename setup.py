# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Packaging; tool tables are in pyproject.toml, pins in constraints.txt."""

import setuptools

setuptools.setup(
    name="branch_replay",
    version="0.1.0",
    description=(
        "Reinforcement-learning post-training over very long shared contexts:"
        " run the prefix once, train on its divergent tails."
    ),
    license="Apache-2.0",
    packages=setuptools.find_packages(include=["branch_replay*"]),
    python_requires=">=3.11",
    install_requires=[
        "absl-py",
        "array_record",
        "chex",
        "flax",
        "gguf",
        "huggingface_hub",
        "importlib_resources",  # tensorflow-datasets, which does not say so
        "jax>=0.10.2,<0.11",  # flax linen breaks from jax 0.11.1
        "jinja2",
        "matplotlib",
        "ml_collections",
        "ml_dtypes",
        "numpy",
        "optax",
        "orbax-checkpoint",
        "pyarrow",
        "safetensors",
        "tensorboardX",
        "tensorflow-datasets",
        "tokenizers",
        "tqdm",
        "transformers",  # tokenizers and chat templates; torch is not needed
    ],
    extras_require={
        "reasoning": ["reasoning-gym"],
        "test": [
            "ipykernel", "nbclient", "nbformat", "pytest", "pytest-xdist",
            "ruff",
        ],
        "wandb": ["wandb"],
    },
)
