"""The samplers inside a sampler, with their epochs, states and generators."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torch.utils.data import Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from numapin.data.resume import randomness

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_TORCHS: Final = "torch.utils.data."
_DRAWS_NOTHING: Final = (SequentialSampler, DistributedSampler)  # from the process's own generators


def is_stateful(value: object) -> bool:
    """Return whether a value has `state_dict` and `load_state_dict`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def state_or_none(value: Any) -> Any:
    """Return a stateful value's state; None for any other."""
    return value.state_dict() if is_stateful(value) else None


def load_own(value: Any, state: Any) -> bool:
    """Load the own state of a stateful value; return whether there was one to load. None: there is none."""
    if state is None or not is_stateful(value):
        return False
    value.load_state_dict(state)
    return True


def drawn(iterator: Iterator[Any], number: int) -> Iterator[Any]:
    """Yield at most this number of values, by `next` alone: `iter()` of a user's iterator may begin again."""
    for _ in range(number):
        try:
            value = next(iterator)
        except StopIteration:
            return
        yield value


class Draws(NamedTuple):
    """All that decides the order of a sampler, at one moment.

    Attributes:
        process: The process's own generators, by library.
        generators: The samplers' and the loader's own generators.
    """

    process: dict[str, Any]
    generators: list[Any]


class Samplers:
    """A sampler and those inside it, outermost first."""

    def __init__(
        self, outermost: object, generator: torch.Generator | None, libraries: tuple[str, ...] | None = None
    ) -> None:
        """Find the samplers in each other's attributes.

        `generator` is the loader's own. `libraries`: whose global generators decide; None: those that the samplers use.
        """
        self.all = tuple(_found_in(outermost))
        held = chain(chain.from_iterable(map(_attributes, self.all)), [generator])
        unique = {id(value): value for value in filter(randomness.is_generator, held)}
        self._generators = list(unique.values())
        self._libraries = self._read_libraries() if libraries is None else libraries

    def draws(self) -> Draws:
        """Return the states of all generators now."""
        process = randomness.process_states(self._libraries)
        return Draws(process, [randomness.state_of(generator) for generator in self._generators])

    def set_draws(self, draws: Draws) -> None:
        """Set all generators. The caller preserves those of the process."""
        randomness.set_process(draws.process)
        for generator, state in zip(self._generators, draws.generators, strict=False):
            randomness.set_state(generator, state)

    @property
    def epochs(self) -> list[int | None]:
        """Return each sampler's epoch; None for samplers without `set_epoch`."""
        return [_epoch_of(sampler) for sampler in self.all]

    def set_epochs(self, epochs: list[int | None]) -> list[tuple[str, int, int]]:
        """Set each sampler's epoch. Return those that had another one: the class, the epoch it had, the new one."""
        changed = []
        for sampler, wanted in zip(self.all, epochs, strict=False):
            had = _epoch_of(sampler)
            if wanted is not None and had is not None and had != wanted:
                sampler.set_epoch(wanted)
                changed.append((type(sampler).__name__, had, wanted))
        return changed

    @property
    def states(self) -> list[Any]:
        """Return the own state of each sampler but the outermost; None for those without one."""
        return [state_or_none(sampler) for sampler in self.all[1:]]

    def set_states(self, states: list[Any]) -> None:
        """Load the samplers' own states."""
        for sampler, state in zip(self.all[1:], states, strict=False):
            load_own(sampler, state)

    @property
    def has_custom(self) -> bool:
        """Return whether one of the samplers is not torch's."""
        return any(not type(sampler).__module__.startswith(_TORCHS) for sampler in self.all)

    def _read_libraries(self) -> tuple[str, ...]:
        if self.has_custom:
            return randomness.ALL
        innermost = self.all[-1]
        return () if isinstance(innermost, _DRAWS_NOTHING) else randomness.TORCH_ONLY


def _found_in(outermost: object) -> Iterator[Any]:
    seen: set[int] = set()
    todo = [outermost]
    while todo:
        sampler = todo.pop(0)
        if id(sampler) not in seen:
            seen.add(id(sampler))
            yield sampler
            todo += [value for value in _attributes(sampler) if isinstance(value, Sampler) or _is_named(sampler, value)]


def _is_named(owner: Any, value: object) -> bool:
    """Return whether a value is its owner's `sampler` or `batch_sampler` without being a torch Sampler."""
    names = vars(owner) if hasattr(owner, "__dict__") else {}
    is_sampler = any(names.get(name) is value for name in ("sampler", "batch_sampler"))
    return is_sampler and hasattr(value, "__iter__") and not isinstance(value, list | tuple | range)


def _attributes(sampler: object) -> list[Any]:
    return list(vars(sampler).values()) if hasattr(sampler, "__dict__") else []


def _epoch_of(sampler: Any) -> int | None:
    epoch = getattr(sampler, "epoch", None)
    return epoch if isinstance(epoch, int) and callable(getattr(sampler, "set_epoch", None)) else None
