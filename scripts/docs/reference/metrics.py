"""The metrics of running services, as their /metrics list them, and those of a training run."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from ngym.trainer.reporting.metrics import MEASURED

from .markup import code, table, words
from .specimen import Specimen

# where they were read -> of what they are
READ = {
    "counter": "every service",
    "counter_agent": "agents",
    "policy": "model servers",
    "endpoint": "models/openai and the like",
    "head": "the head",
}
INTRO = """\
# Metrics

## Of services: `/metrics` {#services}

Read from running services. `models/vllm` also has vLLM's own (`vllm:...`). How Prometheus finds them: [operations](../operations.md).
"""
TRAINING = """\
## Of a training run: `metrics.jsonl` {#training}

A line for each step, with `step` and those of these that the run has. `{...}` stands for a name.
"""


def text(specimen: Specimen) -> str:
    seen: set[str] = set()
    rows = []
    for service, of_what in READ.items():
        for family in text_string_to_metric_families(specimen.metrics[service]):
            if family.name in seen or family.name.startswith("python_") or family.name.endswith("_created"):
                continue
            seen.add(family.name)
            labels = sorted({label for sample in family.samples for label in sample.labels} - {"le", "quantile"})
            name = family.name + ("_total" if family.type == "counter" else "")
            shown = f"{name}{{{','.join(labels)}}}" if labels else name
            rows.append((code(shown), family.type, words(family.documentation), of_what))
    measured = MEASURED
    return "\n".join(
        [
            INTRO,
            table(("Name", "Type", "", "Of"), rows),
            TRAINING,
            table(("Name", ""), [(code(name), words(what)) for name, what in measured.items()]),
        ]
    )
