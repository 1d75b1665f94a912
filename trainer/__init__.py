"""The trainer, imported as `ngym.trainer`: samples in, better weights out.

    a file:  rows -> algorithm.samples -> algorithm.prepare ─┐
    live:    publish -> collect -> algorithm.prepare ────────┴-> batches -> the loop:
             plan -> pack -> engine.scores -> algorithm.loss -> engine.backward -> engine.step -> metrics

train         from a recipe to a saved policy; start reading here
training_run  what train does when the recipe is checked: load, resume, train, save
recipe        the typed recipe; algorithms and objective hold its parts about reinforcement learning
loop          the training loop of every algorithm, and its batches: from a file (data/file_batches) or live (online)
algorithms    one file each: samples, preparation, and scores to loss
data          rows and scored rollouts as samples
online        live rollouts as batches; task_sampler chooses each step's tasks, by epochs or by curriculum
weights       syncs new weights to the model servers
evaluation    held-out tasks through the services (live_eval), or a loss on a file (heldout_loss)
reporting     the display, metrics.jsonl, and the sinks: TensorBoard, W&B, MLflow
model         the network, its logprobs in chunks, and packing: micro-batches without padding or repeated prefixes
engine        scores, backward, step, save: the only package that imports deepspeed. distributed has the process group
              and the heartbeat; sanity_checks is about the first samples, and steps that are not finite
checkpoints   written atomically; a run is continued from one
losses        pure functions: tensors and numbers in and out
seeds         from the recipe's seed to each random choice
sweep         several runs, each in a separate process, and a table of their results
"""
