"""Describes the faults of a training run as data, for the simulator (`simulate`).

    Faults(kill=[(3, 20)], slow=[(5, 1.5)], link=[(0, 0.25)])

In this example rank 3 dies in step 20. Rank 5 takes 1.5 times as long to compute. Rank 0 has a quarter of its
bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, TypeVar

from pydantic import Field, model_validator

from meshwright.core.codec import StrictModel, validate_data
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.core.quantities import Seconds


class _RankFault(StrictModel):
    """One fault. It can be built from a tuple of its values in order. `parse_faults` builds it from a text of these
    values joined by colons."""

    rank: int = Field(ge=0)

    @model_validator(mode="before")
    @classmethod
    def _from_values(cls, data: Any) -> Any:
        if isinstance(data, list | tuple):
            if len(data) > len(cls.model_fields):
                raise ValueError(
                    Message(
                        "{form} has at most {count} values, got {given}",
                        form=cls.form(),
                        count=len(cls.model_fields),
                        given=len(data),
                    )
                )
            return dict(zip(cls.model_fields, data))
        return data

    @classmethod
    def form(cls) -> str:
        """Returns the text form of the fault.

        >>> SlowRank.form()
        'RANK:FACTOR'
        """
        return ":".join(name.upper() for name in cls.model_fields)


class SlowRank(_RankFault):
    """A straggler: a rank that takes `factor` times as long to compute."""

    factor: float = Field(gt=0, allow_inf_nan=False)


class KilledRank(_RankFault):
    """A rank that dies in the middle of a step. Steps count from 1."""

    step: int = Field(ge=1)


class SlowLink(_RankFault):
    """A rank with a slow link: only the fraction `share` of the bandwidth remains. The fault begins
    `start` seconds after the beginning of the step and lasts `seconds` seconds. If `seconds` is None, it is permanent
    and `start` is ignored."""

    share: float = Field(ge=0, le=1, description="fraction of the bandwidth that remains; 0: the link is down")
    seconds: Seconds | None = None
    start: Seconds = 0.0


class Faults(StrictModel):
    """All faults of one training run. Faults change only the time of a run, not its result."""

    kill: tuple[KilledRank, ...] = ()
    slow: tuple[SlowRank, ...] = ()
    link: tuple[SlowLink, ...] = ()

    @property
    def ranks(self) -> set[int]:
        """Returns the ranks that are slow or have a slow link."""
        return {fault.rank for fault in (*self.slow, *self.link)}

    def check(self, world: int) -> Self:
        """Returns itself if the faults fit a run of `world` ranks.

        Raises: InputError for a rank that does not exist, has two faults of the same kind other than `kill`, or has a
        link that is permanently down.
        """
        for name in Faults.model_fields:
            faults = getattr(self, name)
            for fault in faults:
                if fault.rank >= world:
                    raise InputError(
                        Message(
                            "{name}: rank {rank} is not one of the {world} ranks, 0 to {last}",
                            name=name,
                            rank=fault.rank,
                            world=world,
                            last=world - 1,
                        )
                    )
            twice = [
                fault.rank
                for at, fault in enumerate(faults)
                if name != "kill" and fault.rank in [one.rank for one in faults[:at]]
            ]
            if twice:
                raise InputError(Message("{name}: rank {twice} is named twice", name=name, twice=twice[0]))
        for fault in self.link:
            if fault.share == 0 and fault.seconds is None:
                raise InputError(
                    Message(
                        "link: rank {rank} has no bandwidth until the end, so no step ends; give a duration, such as "
                        "{rank}:0:2s, or kill the rank",
                        rank=fault.rank,
                    )
                )
        return self


FaultType = TypeVar("FaultType", bound=_RankFault)


def parse_faults(kind: type[FaultType], texts: Sequence[str], where: str) -> tuple[FaultType, ...]:
    """Parses the texts of the option `where`. One text may have several faults, joined by commas.

    Raises: InputError for a text that is not a fault of this kind.

    >>> parse_faults(SlowRank, ["3:1.5,4:2"], "--slow")[1].factor
    2.0
    """
    return tuple(_parse_fault(kind, part.strip(), where) for text in texts for part in text.split(","))


def _parse_fault(kind: type[FaultType], text: str, where: str) -> FaultType:
    values: list[Any] = list(text.split(":"))
    needed = sum(field.is_required() for field in kind.model_fields.values())
    if not needed <= len(values) <= len(kind.model_fields):
        raise InputError(
            Message(
                "{where} {text!r} is not {form}; write it like {where} {fault_examples}",
                where=where,
                text=text,
                form=kind.form(),
                fault_examples=_FAULT_EXAMPLES[kind.__name__],
            )
        )
    for at, (value, field) in enumerate(zip(values, kind.model_fields.values())):
        if field.annotation in (int, float):
            try:
                values[at] = field.annotation(value)
            except ValueError:
                raise InputError(
                    Message(
                        "{where} {text!r}: {value!r} is not a number; write it like {where} {fault_examples}",
                        where=where,
                        text=text,
                        value=value,
                        fault_examples=_FAULT_EXAMPLES[kind.__name__],
                    )
                ) from None
    return validate_data(kind, values, f"{where} {text!r}")


_FAULT_EXAMPLES = {"SlowRank": "3:1.5", "KilledRank": "3:20", "SlowLink": "3:0.25"}
