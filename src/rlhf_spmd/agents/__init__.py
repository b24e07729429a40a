"""Agents: programs that ask the model over HTTP while it is trained, with branches, retries and tools of their own.

Floor F3. Nothing here knows of generators: ``workers/agent_rollouts.py`` generates what agents ask for. In reading order:

- ``config``: the section ``agent``
- ``forest``: an episode's turns, and the rows that they become; pure
- ``answer_calls``: the calls of tools in a response, also of ``serve``
- ``dialect``: between a chat's messages and token ids
- ``request_parts``, ``openai_responses``, ``anthropic_messages``: other forms of chats; pure
- ``forms``: all forms, also those of ``serve``
- ``run_episodes``: the program of the process in which agents run
- ``agent_process``: that process, as the one that answers agents sees it
- ``episodes``: episodes, their attempts and ends
- ``http``: what every endpoint does with a request and an error, also that of ``serve``
- ``listener``: where programs outside find the endpoints of a run
- ``outside_agents``: programs that the trainer has not started, which fetch episodes and post rewards
- ``endpoint``: HTTP for the agents of a replica
- ``server``: the process that has all this, and the rank's end of it
"""
