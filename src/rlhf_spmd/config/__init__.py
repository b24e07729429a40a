"""Strict configuration and the rule "name = module".

Floor F0: imports nothing of this project, and neither torch nor omegaconf at import time.

- :func:`load` reads a YAML file and dotted overrides into a frozen dataclass; every mistake is one line (:class:`ConfigError`).
- :func:`check_tree` calls ``check(where)`` on every dataclass of a loaded configuration.
- :func:`to_dict`, :func:`to_yaml` write a configuration out again; the YAML loads to an equal object.
- :func:`find` and :func:`resolve_function` turn a name in the configuration into a module or a function.
"""

from rlhf_spmd.config.load import ConfigError, check_tree, load, to_dict, to_yaml
from rlhf_spmd.config.registry import find, resolve_function

__all__ = ["ConfigError", "check_tree", "find", "load", "resolve_function", "to_dict", "to_yaml"]
