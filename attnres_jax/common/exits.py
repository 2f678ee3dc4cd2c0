# SPDX-License-Identifier: Apache-2.0
"""Exit statuses of a run, which say whether to try it again.

Every launcher maps them: a run that diverged or was refused is not restarted.
"""

import enum
import errno
import sys

from attnres_jax import config as config_lib

# A restart meets the same error: the input is invalid, or the program is.
_NEVER = (
  config_lib.ConfigError, config_lib.RunError, ImportError, AssertionError,
  AttributeError, LookupError, NameError, NotImplementedError, TypeError,
)  # fmt: skip


# So does a path that cannot be what it should be.
_PATHS = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


class Exit(enum.IntEnum):
  """How a run ended.

  Attributes:
    DONE: finished, now or before.
    AGAIN: try again: killed, a device, host, disk or network failed, or another
      live worker is training the run.
    NEVER: refused; the config, a plan, the data or the program has to change.
    DIVERGED: a loss or gradient was not finite.
    STOPPED: by a signal, with a checkpoint; rerun the same command to resume.
  """

  DONE = 0
  AGAIN = 1
  NEVER = 2
  DIVERGED = 3
  STOPPED = 4


class DivergedError(config_lib.RunError):
  """A loss or gradient was not finite."""


class HeldError(config_lib.ConfigError):
  """Another live process holds the folder of a run."""


def of_error(error: BaseException) -> Exit:
  """The status for an exception that ended a run."""
  if isinstance(error, DivergedError):
    return Exit.DIVERGED
  if isinstance(error, OSError) and error.errno in _PATHS:
    return Exit.NEVER
  # Some errors of a store are ConfigErrors, too.
  if isinstance(error, (HeldError, OSError)):
    return Exit.AGAIN
  # The same program needs the same memory again.
  is_memory = is_of_jax(error) and "RESOURCE_EXHAUSTED" in str(error)
  never = is_memory or is_of_options(error) or isinstance(error, _NEVER)
  return Exit.NEVER if never else Exit.AGAIN


def is_of_jax(error: BaseException) -> bool:
  """Whether a program of JAX failed with it. Does not import JAX."""
  jax = sys.modules.get("jax")
  return jax is not None and isinstance(error, jax.errors.JaxRuntimeError)


def is_of_options(error: BaseException) -> bool:
  """Whether the compiler refuses an option, or its value."""
  words = str(error).partition("\n")[0]
  return is_of_jax(error) and (
    "INVALID_ARGUMENT" in words and "option" in words.lower()
  )
