"""The learner: samples in, better weights out. A program that `ng_train` loads by its path, never an import name.

    a file:  rows -> algorithm.samples -> algorithm.prepare ─┐
    live:    publish -> collect -> algorithm.prepare ────────┴-> batches -> the loop:
             plan -> pack -> engine.logprobs -> algorithm.loss -> engine.backward -> engine.step -> metrics

program    from a recipe to a saved policy; where to begin reading
config     the recipe, typed; rl and objective have what it says about reinforcement learning
loop       the one loop that serves every algorithm; guard skips steps that are no numbers
algorithms one small file each: samples, what they need to know beforehand, logprobs to loss
offline    a finished file as batches
live       live rollouts as batches, from `services`; publish pushes what was learned, evaluation looks at it
rollouts   scored rollouts as samples; checks look at the first of them before they are trained
packing    a batch -> micro-batches of whole sequences without padding
model      the network, and the logprobs of the tokens that it is trained on
engine     logprobs, backward, step, save: the only file that imports deepspeed

losses, advantages, corrections, kl, gae, preference, reduction and shaping are pure: tensors and numbers in and out.
"""
