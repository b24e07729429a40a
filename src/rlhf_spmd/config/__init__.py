"""Strict configuration: YAML and dotted overrides into frozen dataclasses. And the rule "name = module".

Floor F0: imports nothing of this project and no torch; only ``load``, ``interpolation`` and ``foreign_input`` import omegaconf.

How a configuration is loaded, in reading order:

- ``load``: ``load.load`` reads a file and overrides; every mistake is one line (``schema.ConfigError``). ``load.check_tree`` checks
  ranges and choices, and calls ``check(where)`` of each section. ``load.to_yaml`` writes a configuration out again
- ``written``: YAML whose plain values stay text until the type of their key is known
- ``interpolation``: ``${...}``. A value from the environment (:class:`~interpolation.FromEnvironment`) is never written out
- ``schema``: mappings into dataclasses; ``schema.inline`` marks a field whose keys are keys of its section
- ``constraints``: types with ranges for fields; choices are ``Literal``
- ``rules``: settings that contradict each other (``rules.Rule``), as data beside the dataclass that owns them
- ``keys``: all keys with type, default and text, and what sections refuse, for ``--help``, completion and documents

Names and other inputs:

- ``registry``: ``registry.find`` and ``registry.resolve`` turn a name into a module or a function
- ``json_input``: JSON from outside, of bounded depth

Other projects' settings, for hints and for ``rlhf-spmd convert``:

- ``foreign``: their names (``foreign.yaml``), and what stands for each here
- ``foreign_input``: reads a YAML file or a shell script of theirs, with overrides
- ``shell_script``: the arguments that a shell script gives to a program
- ``verl_settings``, ``trl_settings``: settings of verl and TRL that stand for several of ours

It must not know what the keys are about: sections are dataclasses beside the code that they configure.
"""
