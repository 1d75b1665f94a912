"""The learner: samples in, better weights out. A program that `ng_train` loads by its path, never an import name.

    a file:  rows -> algorithm.samples -> algorithm.prepare ─┐
    live:    publish -> collect -> algorithm.prepare ────────┴-> batches -> the loop:
             plan -> pack -> engine.scores -> algorithm.loss -> engine.backward -> engine.step -> metrics

program    from a recipe to a saved policy; where to begin reading
config     the recipe, typed; rl and objective have what it says about reinforcement learning
loop       the one loop that serves every algorithm; guard skips steps that are no numbers
algorithms one small file each: samples, what they need to know beforehand, scores to loss; credit is rewards to advantages
offline    a finished file as batches
live       live rollouts as batches, from `services`; publish pushes what was learned, evaluation looks at it
tasks      which tasks a step trains on: environments in their shares, each by epochs or by its curriculum
evaluation held-out tasks through the services; heldout is the same for a file
metrics    a line on the screen, metrics.jsonl, and the sinks: TensorBoard, W&B, MLflow
measured   what each of those metrics is, by name
rollouts   scored rollouts as samples; checks look at the first of them before they are trained
packing    a batch -> micro-batches without padding, in which a common beginning is computed once
model      the network, and what it says of the tokens that it is trained on (scores), its logits in chunks; critic beside it
engine     scores, backward, step, save: the only file that imports deepspeed
ranks      how they meet, wait for one another and part; company finds out which of them is gone

losses, advantages, corrections, kl, gae, preference, reduction and shaping are pure: tensors and numbers in and out.
"""
