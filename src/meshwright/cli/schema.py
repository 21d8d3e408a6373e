"""`meshwright schema`: the JSON Schema of a job file, for editors."""

from __future__ import annotations

from typing import Any

from meshwright.cli.options import Language, print_json


def schema(*, lang: Language = None) -> int:
    """Print the JSON Schema of a job file, for editors that complete and check YAML.

    Try: meshwright schema > job.schema.json

    and in the first line of a job file: # yaml-language-server: $schema=job.schema.json
    """
    print_json(job_schema())
    return 0


def job_schema() -> dict[str, Any]:
    """Returns the JSON Schema of a job file. Its section `plan` accepts the fields of a plan, and also `dp` and
    `name`."""
    from meshwright.planner.inputs.job import JobFile
    from meshwright.spec.plan import Plan

    document = JobFile.model_json_schema()
    plan = Plan.model_json_schema()
    document.setdefault("$defs", {}).update(plan.get("$defs", {}))
    fields = {name: entry for name, entry in plan["properties"].items() if name != "version"}
    fields["dp"] = {"type": "integer", "minimum": 1, "description": "replicas in all"}
    fields["name"] = {"type": "string", "description": "a whole plan, such as dp8.tp2.pp4.z1, or a file"}
    document["properties"]["plan"] = {"type": "object", "properties": fields, "additionalProperties": False}
    document["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    document["title"] = "Meshwright job"
    return document
