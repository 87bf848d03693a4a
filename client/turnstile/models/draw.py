"""The choice of a task and of its episode's seed by a seed: one rule for the Gymnasium environment and for
OpenEnv.

A generator is made from the seed as Gymnasium makes it. Each reset that names no task draws a position in the list
of tasks; each that names no seed then draws a seed. So the first reset of a seed, and every reset after it, choose
the same in both, over the same list.
"""

from __future__ import annotations

import numpy as np

SEEDS = 2**31
"""Drawn seeds are below it."""


def generator_of(seed: int) -> np.random.Generator:
    """The generator of ``gymnasium.Env.reset(seed=seed)``; a negative seed, which Gymnasium refuses, is taken as
    its two's complement of 128 bits."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed % 2**128)))


def draw_position(generator: np.random.Generator, tasks: int) -> int:
    """A position in a list of that many tasks."""
    return int(generator.integers(tasks))


def draw_seed(generator: np.random.Generator) -> int:
    return int(generator.integers(SEEDS))
