"""The launcher under a torch whose private names are different, and an agent that has to leave."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined] # torch marks no exports
from torch.distributed.elastic.rendezvous import RendezvousParameters, dynamic_rendezvous

from numapin.cli.run import make_run_parser
from numapin.errors import NumapinError
from numapin.launcher import agent, rendezvous
from numapin.launcher.torchrun import parse

SHARING = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def test_a_handler_with_other_attributes_shares_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch renames what we set in each round, it is told to use a store of the ranks' own instead."""
    monkeypatch.delenv(SHARING, raising=False)
    handler: Any = SimpleNamespace(_bootstrap_store_info=None)
    given: object = rendezvous._with_store_per_round(handler)
    assert given is handler
    assert type(given) is SimpleNamespace
    assert os.environ.pop(SHARING) == "1"


def test_one_host_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rendezvous of one host begins without torch's random delay, which spreads the requests of many hosts."""

    def delay(seconds: object) -> None:
        pytest.fail(f"waits {seconds} s")

    monkeypatch.setattr(dynamic_rendezvous, "_delay", delay)
    parameters = RendezvousParameters(rendezvous.ONE_HOST, "", "id", 1, 1, local_addr="127.0.0.1")
    handler = rendezvous.OneHost(parameters)
    assert handler.next_rendezvous().world_size == 1
    handler.shutdown()


@pytest.mark.parametrize(("num_hosts", "closes"), [(2, False), (1, True)])
@pytest.mark.parametrize("step", ["_start_workers", "_restart_workers"])
def test_a_host_that_leaves_lets_the_others_continue(step: str, num_hosts: int, closes: bool) -> None:  # noqa: FBT001
    """An error of ours before a start stops this host's ranks; the rendezvous stays open if enough hosts remain."""

    def fail() -> None:
        raise NumapinError("no folder", "")

    stopped: list[object] = []
    left: Any = object.__new__(agent._Agent)
    left._job = SimpleNamespace(min_max_nodes=(1, 2))
    left._before_restart = left._new_logs = fail
    left._stop_workers, left._store = stopped.append, HashStore()
    handler = SimpleNamespace(shutdown=lambda: "closed")
    group = SimpleNamespace(group_world_size=num_hosts, spec=SimpleNamespace(rdzv_handler=handler))
    with pytest.raises(NumapinError, match="no folder"):
        getattr(left, step)(group)
    assert stopped == [group]
    assert (handler.shutdown() == "closed") is closes


def test_options_that_torch_2_9_does_not_have() -> None:
    """Without them in torch's parser, no signal ends the ranks but torch's own, and each rank has its own number."""
    job = parse([__file__], make_run_parser())
    for name in ("virtual_local_rank", "signals_to_handle"):
        vars(job.arguments).pop(name, None)  # not there if this is torch 2.9
    assert not job.virtual_local_rank
    assert not job.signals
