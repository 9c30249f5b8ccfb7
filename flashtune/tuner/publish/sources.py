"""Source text of records, which `flashtune generate` ships and `flashtune verify` checks again."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from flashtune.core.config import Variant
from flashtune.core.results import Fate, TuningRecord
from flashtune.core.target import Target, targets
from flashtune.templates import family
from flashtune.templates.rendering import variant_of
from flashtune.tuner.children import tasks
from flashtune.tuner.children.tasks import Source
from flashtune.tuner.children.workers import Workers
from flashtune.tuner.replies import Checked, Failed


def variant_for(record: TuningRecord) -> Variant:
    """Variant of a record's config by the installed template; raises InputError for a config outside the declared space.

    Its hash, id and file name are those of the present template: where the text or an axis has changed since the record was written, they
    are not the record's.
    """
    chosen = family(record.outcome.template)
    return variant_of(chosen, record.problem.spec(), chosen.completed(record.outcome.config))


def source_for(record: TuningRecord) -> Source:
    """Rendered source of a record."""
    variant = variant_for(record)
    return Source.of(family(variant.template), variant)


def recheck(records: Sequence[TuningRecord], *, here: Target | None, seed: int) -> Iterator[tuple[TuningRecord, Checked | Failed | None]]:
    """Check every record's kernel against the float64 oracle: on the GPU `here`, else in Triton's interpreter.

    Yields None for a record that can't be checked on this machine: another GPU's, or one that no interpreter runs. A record whose config
    the declared space refuses fails at `constraint`, and one whose inputs the GPU can't take fails with that reason.
    """
    with Workers(jobs=1) as workers:
        for record in records:
            try:
                source = source_for(record)
            except ValueError as error:
                yield record, Failed(fate=Fate.CONSTRAINT, reason=str(error))
                continue
            limits = workers.limits
            if here is not None:
                measured_on = targets().get(record.key.gpu)
                if measured_on is None or measured_on.arch != here.arch:
                    yield record, None
                    continue
                ready = workers.prepare(record.problem, here, seed, pytorch=False)
                if isinstance(ready, Failed):
                    yield record, ready
                    continue
                pending = workers.submit("device", tasks.recheck_on_device, source, record.problem, here, seed, limit_s=3 * limits.device_s)
            elif family(record.outcome.template).interpretable:
                problem = replace(record.problem, batch=1, dtype="fp16") if record.problem.dtype == "bf16" else record.problem
                text = source_for(replace(record, problem=problem))
                pending = workers.submit("interpret", tasks.interpret_candidate, text, problem, seed, limit_s=limits.interpret_s)
            else:
                yield record, None
                continue
            yield record, pending.reply()
