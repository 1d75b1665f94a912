"""The learner: samples in, better weights out. A program that `ng_train` loads by its path, never an import name.

    a file:  rows -> algorithm.samples -> algorithm.prepare ─┐
    live:    publish -> collect -> algorithm.prepare ────────┴-> batches -> the loop:
             plan -> pack -> engine.scores -> algorithm.loss -> engine.backward -> engine.step -> metrics

train         from a recipe to a saved policy; where to begin reading
recipe        the recipe, typed; rl and objective have what it says about reinforcement learning
loop          the one loop that serves every algorithm
algorithms    one small file each: samples, what they need to know beforehand, scores to loss; credit_assignment is rewards to
              advantages
batch_sources a run's batches: data/offline of a finished file, or online
data          rows and scored rollouts as samples
online        live rollouts as batches, from services; task_sampler says which tasks a step trains on: environments in their
              shares, each by epochs or by its curriculum
weights       publishes what was learned to the servers that sample
evaluation    held-out tasks through the services (live_eval), or a loss on a file (heldout_loss)
reporting     a line on the screen, metrics.jsonl, and the sinks: TensorBoard, W&B, MLflow; metric_names is what each metric is
sanity_checks look at the first samples before they are trained
model         the network (policy), and what it says of the tokens that it is trained on (outputs), its logits in chunks; packing
              makes of a batch micro-batches without padding, in which a common beginning is computed once; critic beside it
engine        scores, backward, step, save: the only package that imports deepspeed. distributed is how ranks meet, wait for one
              another and part; heartbeat finds out which of them is gone; nan_guard skips steps that are no numbers
checkpoints   written as a whole or not at all; resume takes a run up again
losses        pure: tensors and numbers in and out
sweep         several runs, each in a process of its own, and a table of their results
"""
