"""Strict configuration and the rule "name = module".

Floor F0: imports nothing of this project and no torch; only ``load`` and ``interpolation`` import omegaconf.

- ``load.load`` reads a YAML file and dotted overrides into a frozen dataclass. Every mistake is one line (``schema.ConfigError``).
- ``constraints``: types with ranges for the fields of a configuration; choices are ``Literal``.
- ``load.check_tree`` checks ranges and choices and calls ``check(where)`` on every dataclass of a loaded configuration.
- ``schema.inline``: a field whose keys are keys of the section that has it.
- ``load.to_dict``, ``load.to_yaml`` write a configuration out again; the YAML loads to an equal object.
- ``written.parse``: YAML whose plain values stay text until the type of their key is known.
- ``interpolation``: ``${...}``. A value from the environment is :class:`~interpolation.FromEnvironment` and is never written out.
- ``json_input.parse_json``: JSON from outside, of bounded depth.
- ``registry.find``, ``registry.resolve``, ``registry.resolve_function`` turn a name into a module or a function.
  ``registry.find_builtin`` takes only a name of this project.
"""
