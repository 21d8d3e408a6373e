"""`meshwright fit`: the largest model that fits, the smallest cluster for a model."""

from __future__ import annotations

import os

from meshwright.cli.options import (
    AsJson,
    JobOptions,
    JobPath,
    Language,
    announce_defaults,
    print_json,
    print_output,
)
from meshwright.core.language import choose_language
from meshwright.core.messages import Message, alternatives


def fit(
    job: JobPath = None,
    /,
    *,
    shared: JobOptions = JobOptions(),  # noqa: B008
    json: AsJson = False,
    lang: Language = None,
) -> int:
    """Without a model, the largest model that fits on each number of devices, under DDP, each ZeRO stage, and all
    plans. With a model, the fewest devices on which it fits.

    Try: meshwright fit --cluster 8x8:a100-80gb --seq 2048
    """
    from meshwright.core.errors import NothingFits
    from meshwright.planner.inputs.job import UNKNOWN_CONTEXT, resolve_job
    from meshwright.planner.search.fit import STRATEGIES, fit_chart, smallest_cluster, split_by_node_type
    from meshwright.report.fit import fit_data, fit_text

    language = choose_language(lang, os.environ)
    file = shared.job_file(job)
    if shared.model is None and job is None:  # the chart is of GPT-shaped models, whose context is not limited
        file = file.but(workload={"sequence": UNKNOWN_CONTEXT, **file.workload.model_dump(exclude_unset=True)})
    question = resolve_job(file)
    announce_defaults(file, question.workload, language, ("--seq",))
    cluster, workload = question.cluster, question.workload
    model = None if shared.model is None and job is None else question.model
    found = [
        (
            kind,
            list(fit_chart(kind, workload))
            if model is None
            else [smallest_cluster(strategy, model, kind, workload) for strategy in STRATEGIES],
        )
        for kind in split_by_node_type(cluster)
    ]
    if model is None and not any(rows for _, rows in found):
        names = alternatives(kind.groups[0].device.name for kind, _ in found)
        raise NothingFits(
            Message(
                "not even the smallest model fits on {names} at sequence {sequence}",
                names=names,
                sequence=workload.sequence,
            )
        )
    if json:
        data = [fit_data(kind, workload, rows) for kind, rows in found]
        print_json(data[0] if len(data) == 1 else {"kinds": data})
    else:
        print_output("\n\n".join(fit_text(model, kind, workload, rows, language) for kind, rows in found))
    return 0 if model is None or any(row.devices for _, rows in found for row in rows) else NothingFits.exit_code
