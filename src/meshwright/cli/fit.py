"""`meshwright fit`: the largest model for each number of devices, or the smallest cluster for a model."""

from __future__ import annotations

import os

from meshwright.cli.options import AsJson, JobPath, Language, Shared, say, say_json


def fit(
    job: JobPath = None,
    /,
    *,
    shared: Shared = Shared(),  # noqa: B008
    json: AsJson = False,
    lang: Language = None,
) -> int:
    """What fits. Without a model: the largest one for each number of devices, under DDP, each ZeRO stage, and all plans. With a model: the
    fewest devices that hold it.

    Try: meshwright fit --cluster 8x8:a100-80gb --seq 2048
    """
    from meshwright.base.errors import NothingFits
    from meshwright.intake.job import resolve
    from meshwright.report.fit import chart_text, fit_data, smallest_text
    from meshwright.search.fit import STRATEGIES, chart, smallest
    from meshwright.words.say import language_of

    language = language_of(lang, os.environ)
    question = resolve(shared.job_file(job))
    cluster, workload = question.cluster, question.workload
    if shared.model is None and job is None:
        largest = list(chart(cluster, workload))
        if not largest:
            raise NothingFits(f"not even the smallest model fits on {cluster.groups[0].device.name} at sequence {workload.sequence}")
        if json:
            say_json(fit_data(cluster, workload, largest))
        else:
            say(chart_text(cluster, workload, largest, language))
        return 0
    fewest = [smallest(strategy, question.model, cluster, workload) for strategy in STRATEGIES]
    if json:
        say_json(fit_data(cluster, workload, fewest))
    else:
        say(smallest_text(question.model, cluster, workload, fewest, language))
    return 0 if any(row.devices for row in fewest) else NothingFits.exit_code
