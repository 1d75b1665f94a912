"""The learner: samples in, better weights out. A program that `ng_train` loads by its path, never an import name.

    rows -> algorithm.samples -> plan -> pack -> engine.logprobs -> algorithm.loss -> engine.backward -> engine.step

program    from a recipe to a saved policy; where to begin reading
config     the recipe, typed
loop       the one loop that serves every algorithm
algorithms one small file each: rows to samples, logprobs to loss
packing    a batch -> micro-batches of whole sequences without padding
model      the network, and the logprobs of the tokens that it is trained on
engine     logprobs, backward, step, save: the only file that imports deepspeed
"""
