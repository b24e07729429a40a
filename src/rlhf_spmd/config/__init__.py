"""Strict configuration and the rule "name = module".

Floor F0: imports nothing of this project and no torch; only ``load`` and ``interpolation`` import omegaconf.

- ``load.load`` reads a YAML file and dotted overrides into a frozen dataclass; every mistake is one line (``schema.ConfigError``).
- ``load.check_tree`` calls ``check(where)`` on every dataclass of a loaded configuration; ``bounds.check_bounds`` checks numbers in it.
- ``bounds.idle_settings``: what does nothing beside the other settings, which ``check_tree`` refuses.
- ``load.to_dict``, ``load.to_yaml`` write a configuration out again; the YAML loads to an equal object.
- ``written.parse``: YAML whose plain values stay text until the type of their key is known.
- ``interpolation``: ``${...}``; what came from the environment is :class:`~interpolation.FromEnvironment` and is never written out.
- ``json_input.parse_json``: JSON from outside, of bounded depth.
- ``registry.find``, ``registry.resolve`` and ``registry.resolve_function`` turn a name into a module or a function;
  ``registry.find_builtin`` one that is not the user's own word.
"""
