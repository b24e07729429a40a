"""Agents: programs that ask the model over HTTP while it is trained, with branches, retries and tools of their own.

Floor F3. Nothing here knows of generators: ``workers/agent_rollouts.py`` generates what agents ask for. In reading order:

- ``config``: the section ``agent``
- ``forest``: an episode's turns, and the rows that they become; pure
- ``dialect``: between OpenAI's messages and token ids
- ``episodes``: episodes, their attempts and ends, and the process of their agents
- ``run_episodes``: the program of that process
- ``endpoint``: HTTP for the agents of a replica
"""
