"""The state of a loader: the position in the stream, and which data it reads in which order.

The state does not contain ranks, workers or batch sizes, so all of them may change between two runs.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from megatron_packed_sft.data.order.blend_weights import AnnealedWeights
from megatron_packed_sft.errors import InvalidInputError, StateMismatchError

FORMAT: Final = "packed_sft_loader_state"
VERSION: Final = 1
# What must be equal for the rest of the stream to be the same, in the order in which errors name it.
COMPARED: Final = ("fingerprint", "num_samples", "tokenizer", "chat_template", "shuffle", "seed", "weights", "schedule")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendState:
    """How far each source of a blend is.

    Args:
        weights: the blend's weights as integers without a common divisor.
        counts: samples taken from each source.
        shares: counts as shares of all samples, for information.
        epochs: counts divided by the sources' sizes, for information.
        origin_position: where these weights took effect; 0 unless they were changed during the run.
        origin_counts: samples taken from each source before that.
        annealing: how the weights change during the run; None if they do not.
    """

    weights: tuple[int, ...]
    counts: tuple[int, ...]
    shares: tuple[float, ...] = ()
    epochs: tuple[float, ...] = ()
    origin_position: int = 0
    origin_counts: tuple[int, ...] = ()
    annealing: AnnealedWeights | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """The state of a sampler or a loader. `None` means unknown, and is not compared.

    Args:
        consumed_samples: samples handed out so far, over all ranks and epochs; padding samples do not count.
        fingerprint: identifies the dataset.
        num_samples: samples in the dataset.
        shuffle: whether the order is shuffled.
        seed: the seed of the shuffle.
        tokenizer: the tokenizer's fingerprint.
        chat_template: the chat template's fingerprint.
        blend: the state of the blend, if the dataset is one.

    Example:
        >>> state = LoaderState(consumed_samples=512, fingerprint="ab12", num_samples=1000, shuffle=True, seed=1234)
        >>> LoaderState.from_dict(state.to_dict()) == state
        True
    """

    consumed_samples: int
    fingerprint: str
    num_samples: int
    shuffle: bool
    seed: int | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    blend: BlendState | None = None

    @property
    def weights(self) -> tuple[int, ...] | None:
        """The weights of the blend, if there is one."""
        return None if self.blend is None else self.blend.weights

    @property
    def schedule(self) -> str | None:
        """How the weights of the blend change during the run, if they do."""
        return None if self.blend is None or self.blend.annealing is None else str(self.blend.annealing)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON values.

        Example:
            >>> state = LoaderState(consumed_samples=0, fingerprint="ab12", num_samples=10, shuffle=False)
            >>> state.to_dict()["format"], state.to_dict()["version"]
            ('packed_sft_loader_state', 1)
        """
        document: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            document[field.name] = _plain(dataclasses.asdict(value)) if isinstance(value, BlendState) else value
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> LoaderState:
        """Read a state that `to_dict` returned; raise InvalidInputError, naming the field, for anything else.

        Example:
            >>> LoaderState.from_dict({})
            Traceback (most recent call last):
            megatron_packed_sft.errors.InvalidInputError: this is not a loader state of this package (its format is \
None); give load_state_dict what state_dict returned
        """
        if not isinstance(document, Mapping) or document.get("format") != FORMAT:
            found = document.get("format") if isinstance(document, Mapping) else type(document).__name__
            raise InvalidInputError(
                f"this is not a loader state of this package (its format is {found}); "
                "give load_state_dict what state_dict returned"
            )
        if document.get("version") != VERSION:
            raise InvalidInputError(
                f"the loader state has version {document.get('version')!r}, and this release reads {VERSION}; "
                "install the release that wrote it"
            )
        blend = document.get("blend")
        return cls(
            consumed_samples=_field(document, "consumed_samples", int),
            fingerprint=_field(document, "fingerprint", str),
            num_samples=_field(document, "num_samples", int),
            shuffle=_field(document, "shuffle", bool),
            seed=_optional(document, "seed", int, lowest=None),
            tokenizer=_optional(document, "tokenizer", str),
            chat_template=_optional(document, "chat_template", str),
            blend=None if blend is None else _blend(blend),
        )

    def check(self, current: LoaderState, allow_mismatch: Collection[str] = ()) -> None:
        """Refuse to resume from this state if data, tokenizer, template, order or blend differ from `current`.

        Args:
            current: the state of the loader that resumes.
            allow_mismatch: names of fields that may differ; each difference is logged as a warning.

        Example:
            >>> old = LoaderState(consumed_samples=8, fingerprint="ab12", num_samples=10, shuffle=True, seed=1)
            >>> old.check(dataclasses.replace(old, seed=2))
            Traceback (most recent call last):
            megatron_packed_sft.errors.StateMismatchError: the state is from another run: seed was 1 and is 2 now; \
resume with what the state was saved with, or pass allow_mismatch=('seed',) to the sampler or loader to resume anyway
        """
        refuse_unknown(allow_mismatch)
        differing = {
            name: f"{name} was {_short(before)} and is {_short(now)} now"
            for name in COMPARED
            if (before := getattr(self, name)) != (now := getattr(current, name))
            and (name in ("weights", "schedule") or (before is not None and now is not None))
        }
        refused = [name for name in differing if name not in allow_mismatch]
        if refused:
            problems = ", ".join(differing[name] for name in refused)
            raise StateMismatchError(
                f"the state is from another run: {problems}; resume with what the state was saved with",
                tuple(differing),
            )
        for problem in differing.values():
            _log.warning("resuming although the state differs, as allow_mismatch permits: %s", problem)


def refuse_unknown(allow_mismatch: Collection[str]) -> None:
    """Refuse misspelt names early, before they refuse or allow the wrong mismatch."""
    names = (allow_mismatch,) if isinstance(allow_mismatch, str) else tuple(allow_mismatch)
    unknown = [name for name in names if name not in COMPARED]
    if unknown or isinstance(allow_mismatch, str):
        raise InvalidInputError(
            f"allow_mismatch={allow_mismatch!r} must be a tuple of names from {', '.join(COMPARED)}"
        )


def _field(document: Mapping[str, Any], name: str, kind: type, lowest: int | None = 0) -> Any:
    value: Any = document.get(name)
    is_too_low = isinstance(value, int) and lowest is not None and value < lowest
    if type(value) is not kind or is_too_low:
        words = {int: "a non-negative integer" if lowest == 0 else "an integer", str: "a string", bool: "true or false"}
        raise InvalidInputError(
            f"the loader state's {name} is {_short(value)}, not {words[kind]}; restore the checkpoint it came from"
        )
    return value


def _optional(document: Mapping[str, Any], name: str, kind: type, lowest: int | None = 0) -> Any:
    return None if document.get(name) is None else _field(document, name, kind, lowest)


def _blend(document: Any) -> BlendState:
    if not isinstance(document, Mapping):
        raise InvalidInputError(
            f"the loader state's blend is {_short(document)}, not a mapping; restore the checkpoint it came from"
        )
    return BlendState(
        weights=_numbers(document, "weights", int),
        counts=_numbers(document, "counts", int),
        shares=_numbers(document, "shares", float),
        epochs=_numbers(document, "epochs", float),
        origin_position=_field(document, "origin_position", int),
        origin_counts=_numbers(document, "origin_counts", int),
        annealing=_annealing(document.get("annealing")),  # older states have none
    )


def _annealing(document: Any) -> AnnealedWeights | None:
    if document is None:
        return None
    if not isinstance(document, Mapping):
        raise InvalidInputError(
            f"the loader state's blend annealing is {_short(document)}, not a mapping; restore the checkpoint it came "
            "from"
        )
    return AnnealedWeights(
        start=_numbers(document, "start", int),
        end=_numbers(document, "end", int),
        first=_field(document, "first", int),
        last=_field(document, "last", int),
    )


def _plain(value: Any) -> Any:
    """Return a dataclass's values with lists instead of tuples, as in JSON."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _numbers(document: Mapping[str, Any], name: str, kind: type) -> tuple[Any, ...]:
    values = document.get(name)
    kinds = {int} if kind is int else {int, float}  # JSON writers may turn 1.0 into 1
    if (
        not isinstance(values, Sequence)
        or isinstance(values, str)
        or any(type(value) not in kinds or value < 0 for value in values)
    ):
        raise InvalidInputError(
            f"the loader state's blend {name} is {_short(values)}, not a list of non-negative numbers; "
            "restore the checkpoint it came from"
        )
    return tuple(kind(value) for value in values)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
