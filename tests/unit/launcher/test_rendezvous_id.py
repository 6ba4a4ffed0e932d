"""The rendezvous id of several hosts: whether others can know it."""

from __future__ import annotations

import pytest

from tests.unit.launcher.seam import parse, why_known

RANDOM = ["7f3a9c04e1b2d856", "9f86d081884c7d659a2feaa0c55ad015", "3f0e2a4c-9d1b-4c57-8a66-0b1f5e7d9c20"]
TOKENS = ["dGhpcyBpcyBhIHNlY3JldCE", "Xk-9_vQzR2mLwTbYc4uJhA"]
GUESSED = ["none", "pair", "my-training-run-1", "train-7b-2026-11-22-final", "20261122-135500-1234", "0" * 32]


@pytest.mark.parametrize("run_id", [*RANDOM, *TOKENS])
def test_a_random_id_in_the_environment_is_a_secret(run_id: str) -> None:
    """Ids that openssl, uuidgen and Python's secrets make cause no warning."""
    assert why_known(run_id, is_typed=False) is None


@pytest.mark.parametrize("run_id", GUESSED)
def test_a_name_is_easy_to_guess(run_id: str) -> None:
    """Names, dates and constants are no secrets, however long they are."""
    assert why_known(run_id, is_typed=False) == f"the rendezvous id {run_id!r} is easy to guess"


@pytest.mark.parametrize("spelling", ["--rdzv-id", "--rdzv_id"])
@pytest.mark.parametrize("variables", [{"PET_RDZV_ID": RANDOM[0]}, {}])
def test_ps_shows_a_typed_id(spelling: str, variables: dict[str, str]) -> None:
    """An id on the command line is known, also if PET_RDZV_ID has the same value."""
    job = parse(["--nnodes", "2", spelling, RANDOM[0], __file__], {}, variables, python="python", prog="numapin run")
    assert (job.rdzv_id, job.is_id_typed) == (RANDOM[0], True)
    assert why_known(RANDOM[0], is_typed=True) == "ps shows --rdzv-id to every user of this host"


@pytest.mark.parametrize(("variables", "rdzv_id"), [({"PET_RDZV_ID": RANDOM[0]}, RANDOM[0]), ({}, "none")])
def test_an_id_that_is_not_typed(variables: dict[str, str], rdzv_id: str) -> None:
    """PET_RDZV_ID, or torch's default, counts as not typed."""
    job = parse(["--nnodes", "2", __file__], {}, variables, python="python", prog="numapin run")
    assert (job.rdzv_id, job.is_id_typed) == (rdzv_id, False)
