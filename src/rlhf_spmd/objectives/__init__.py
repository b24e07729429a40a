"""RL arithmetic on plain tensors: KL penalties and controllers, advantages, losses.

Floor 1. Knows nothing of models, batches, ranks or meshes: every function takes packed token tensors ``[T]`` (the response
tokens of all rows, concatenated) and ``lengths`` int64 ``[rows]`` on the CPU. What must be summed over ranks comes out as
float64 sums that the caller reduces (:func:`advantages.moments`, :func:`losses.explained_variance_sums`) and goes in again as
global numbers, so that no result depends on how rows were split.

Public names: ``kl.kl_penalty``, ``kl.token_divergence``, ``kl.KLControlConfig``, ``advantages.token_level_rewards``,
``advantages.gae``, ``advantages.group_advantages``, ``advantages.leave_one_out``, ``advantages.length_weighted_advantages``,
``advantages.moments``, ``advantages.whiten``, ``losses.policy_loss``, ``losses.value_loss``, ``losses.aggregate``,
``losses.explained_variance``, the losses of ``ratio_losses``, ``rollout_correction.correction_weights``, ``running.RunningMoments``;
``preferences``, losses of pairs and labelled rows.
"""
