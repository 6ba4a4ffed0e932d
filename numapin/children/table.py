"""The plan of `numapin exec --children` as each Python below the command finds it: the variable NUMAPIN_CHILDREN.

The text has lines, then JSON in the last line. The lines are read by the hook in every Python, so they
take no parser: "3", or "3 strict"; then each variable that may name a device, as the command saw it: NAME if it was
unset, else NAME=VALUE. A process whose variable differs was given a device of its own.
"""

from __future__ import annotations

import json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Final

SLURM_RANK: Final = "SLURM_LOCALID"
_FIRST: Final = "3"


class DeviceEntry:
    """A GPU of the plan: its names, and the slice of the plan for processes that use it.

    `number` is its number among the devices that the command sees, which is also its rank in the plan. `bare` is its
    number if nothing hid devices, which is what an index in CUDA_VISIBLE_DEVICES means; None: unknown.
    """

    __slots__ = ("bare", "index", "mig", "number", "pci", "slice", "uuid")

    def __init__(
        self,
        *,
        number: int,
        bare: int | None,
        index: int,
        uuid: str | None,
        pci: str | None,
        mig: Sequence[str],
        slice: str,  # noqa: A002 - the field's name in the JSON
    ) -> None:
        self.number, self.bare, self.index = number, bare, index
        self.uuid, self.pci, self.mig, self.slice = uuid, pci, tuple(mig), slice

    @property
    def name(self) -> str:
        """The name that messages use, as in `numapin topo`."""
        return "an unknown GPU" if self.index < 0 else f"GPU {self.index}"

    def to_json(self) -> dict[str, object]:
        """Return the fields."""
        return {name: getattr(self, name) for name in self.__slots__}


class ChildTable:
    """The contents of NUMAPIN_CHILDREN.

    `allowed_cpus` are the CPUs that the command may use, as a list. `lists` are the variables that list a process's
    devices, by name: a process does not import the table of vendors. `saw` has their values and those of the other
    variables that may name a device.
    """

    __slots__ = ("allowed_cpus", "devices", "lists", "run", "saw", "strict", "verbose")

    def __init__(
        self,
        *,
        devices: Sequence[DeviceEntry],
        allowed_cpus: str,
        run: str,
        strict: bool,
        verbose: bool,
        lists: Sequence[str],
        saw: Mapping[str, str | None],
    ) -> None:
        self.devices, self.allowed_cpus, self.run = tuple(devices), allowed_cpus, run
        self.strict, self.verbose, self.lists, self.saw = strict, verbose, tuple(lists), dict(saw)

    def with_saw(self, saw: Mapping[str, str | None]) -> ChildTable:
        """Return the same plan for processes that find these values in their environment if no GPU is theirs."""
        return ChildTable(
            devices=self.devices,
            allowed_cpus=self.allowed_cpus,
            run=self.run,
            strict=self.strict,
            verbose=self.verbose,
            lists=self.lists,
            saw={**self.saw, **saw},
        )

    def render(self) -> str:
        """Return the text of the variable. A value with a line break is written as if the variable were unset."""
        first = f"{_FIRST} strict" if self.strict else _FIRST
        lines = (_line(name, value) for name, value in self.saw.items())
        content = {
            "allowed_cpus": self.allowed_cpus,
            "run": self.run,
            "verbose": self.verbose,
            "lists": self.lists,
            "devices": [entry.to_json() for entry in self.devices],
        }
        return "\n".join((first, *lines, json.dumps(content)))

    @classmethod
    def parse(cls, text: str) -> ChildTable:
        """Read the text of the variable. Raises ValueError, KeyError or TypeError for anything else."""
        first, *lines, last = text.split("\n")
        if first.split()[0] != _FIRST:
            msg = "it was written by another version of numapin"
            raise ValueError(msg)
        content = json.loads(last)
        return cls(
            devices=[DeviceEntry(**entry) for entry in content["devices"]],
            allowed_cpus=content["allowed_cpus"],
            run=content["run"],
            strict="strict" in first.split(),
            verbose=content["verbose"],
            lists=content["lists"],
            saw=dict(map(_setting, lines)),
        )


def _line(name: str, value: str | None) -> str:
    """Return a variable's line, which `_setting` reads."""
    return name if value is None or "\n" in value else f"{name}={value}"


def _setting(line: str) -> tuple[str, str | None]:
    name, equals, value = line.partition("=")
    return name, value if equals else None
