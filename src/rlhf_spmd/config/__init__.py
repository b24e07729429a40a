"""Strict configuration: YAML and dotted overrides into frozen dataclasses. And the rule "name = module".

Floor F0: imports nothing of this project and no torch; only ``load``, ``interpolation`` and ``foreign_input`` import omegaconf.

How a configuration is loaded, in reading order:

- ``load``: :func:`~load.load` reads a file and overrides; :func:`~load.check_tree` checks every section; :func:`~load.to_yaml` writes a
  configuration out again. Every mistake is one line (:class:`~schema.ConfigError`)
- ``plain_yaml``: YAML whose plain values stay text until the types of their keys are known
- ``schema``: mappings into dataclasses; :func:`~schema.inline` marks a field whose keys are keys of its section
- ``interpolation``: ``${...}``. A value from the environment (:class:`~interpolation.FromEnvironment`) is never written out
- ``constraints``: types with ranges, choices (``Literal``), and settings that do nothing without another
- ``rules``: settings that contradict each other (:class:`~rules.Rule`), as data beside the dataclass that owns them
- ``keys``: all keys with type, default and text, and what sections refuse, for ``--help``, completion and documents

Used by all of them, and by other packages:

- ``words``: text for messages, such as the nearest known name
- ``registry``: :func:`~registry.find` and :func:`~registry.resolve` turn a name into a module or a function
- ``json_input``: JSON from outside, of bounded depth

Other projects' settings, for hints and for ``rlhf-spmd convert``:

- ``foreign``: their names (``foreign.yaml``), and what stands for each here
- ``foreign_input``: reads a YAML file or a shell script of theirs, with overrides
- ``shell_script``: the arguments that a shell script gives to a program
- ``verl_settings``, ``trl_settings``: settings of verl and TRL that stand for several of ours

But for other projects' settings it must not know what keys are about: sections are dataclasses beside the code that they
configure.
"""
