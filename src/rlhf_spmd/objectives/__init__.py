"""RL arithmetic on plain tensors: KL penalties and controllers, advantages, losses.

Floor F1. Knows nothing of models, batches, ranks or meshes. Functions of tokens take packed tensors ``[T]`` (the response
tokens of all rows, concatenated) and ``lengths`` int64 ``[rows]`` on the CPU; comparisons within groups take ``[rows]``, those
of ``preferences`` ``[pairs]`` or ``[rows]``. What must be summed over ranks comes out as
float64 sums that the caller reduces (:func:`advantages.moments`, :func:`losses.explained_variance_sums`) and goes in again as
global numbers, so that no result depends on how rows were split.

Files in reading order:

- ``advantages``: from scores to advantages: rewards of tokens, GAE, comparisons within groups, whitening; sums per row
- ``losses``: PPO's policy and value losses, and how losses of tokens become one number
- ``kl``: estimates of the KL to a reference, and the coefficient that follows it
- ``ratio_losses``: other policy losses: GSPO, GMPO, CISPO, SAPO
- ``rollout_correction``: weights and masks where the rollout's log-probs differ from training's
- ``preferences``: losses of pairs and of labelled rows
- ``running``: mean and deviation of all numbers of a run so far
"""
