"""Jobs are done once: by the first who claims them, by another if that one dies, and again if a result is damaged."""

import os
import time

import pytest

from shoestring.studies.jobs import LEASE_SECONDS, Store, identify

JOB = {"kind": "train", "model": "wrn-10-1", "sizes": {"batch": 100}, "settings": {"nonzero": 30}, "seed": 0}


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def test_equal_jobs_have_one_id_and_others_another():
    assert identify(JOB) == identify(dict(reversed(JOB.items())))
    assert identify(JOB) != identify(JOB | {"seed": 1})


@pytest.mark.parametrize("idle", [{"precision": "fp32"}, {"checkpoint": "none"}, {"microbatch": 100}, {"nonzero": 100}])
def test_settings_that_ask_for_nothing_make_no_other_job(idle):
    plain = JOB | {"settings": {}}
    assert identify(JOB | {"settings": idle}) == identify(plain)
    assert identify(plain) != identify(JOB)
    assert identify(JOB | {"settings": {"microbatch": 10}}) != identify(plain)


def test_a_job_is_claimed_by_one_worker_only(store):
    ids = [store.add(JOB)]
    assert store.claim(ids, "first").job == JOB
    assert store.claim(ids, "second") is None
    assert store.state(JOB) == "running"


def test_a_job_that_is_queued_twice_is_done_once(store):
    id = store.add(JOB)
    store.claim([id], "first")
    assert store.add(JOB) == id
    assert store.claim([id], "second") is None


def test_the_job_of_a_dead_worker_is_taken_over_and_it_is_told(store):
    ids = [store.add(JOB)]
    dead = store.claim(ids, "dead")
    long_ago = time.time() - LEASE_SECONDS - 1
    os.utime(dead.path, (long_ago, long_ago))
    assert store.state(JOB) == "waiting"
    living = store.claim(ids, "living")
    assert living.job == JOB and living.renew()
    assert not dead.renew()


def test_a_worker_that_renews_its_claim_is_not_taken_for_dead(store):
    ids = [store.add(JOB)]
    claim = store.claim(ids, "slow")
    long_ago = time.time() - LEASE_SECONDS - 1
    os.utime(claim.path, (long_ago, long_ago))
    assert claim.renew()
    assert store.claim(ids, "second") is None


def test_a_finished_job_has_its_result_and_is_never_queued_again(store):
    id = store.add(JOB)
    store.claim([id], "first").finish({"quality": 0.5})
    assert store.result(JOB) == {"quality": 0.5}
    store.add(JOB)
    assert store.claim([id], "second") is None
    assert store.state(JOB) == "done"


def test_a_failed_job_tells_why_and_is_tried_again_only_if_asked(store):
    id = store.add(JOB)
    store.claim([id], "first").fail("it did not fit")
    assert store.reason(JOB) == "it did not fit"
    store.add(JOB)
    assert store.claim([id], "second") is None
    store.add(JOB, again=True)
    assert store.claim([id], "second") is not None


def test_a_job_that_was_given_back_waits(store):
    ids = [store.add(JOB)]
    store.claim(ids, "first").release()
    assert store.claim(ids, "second") is not None


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]", b'{"job": {}, "result": {"quality": 1}, "sha256": "0"}'])
def test_a_damaged_result_is_found_and_the_job_is_done_again(store, damage):
    id = store.add(JOB)
    store.claim([id], "first").finish({"quality": 0.5})
    (store.path / "done" / f"{id}.json").write_bytes(damage)
    assert store.result(JOB) is None
    store.add(JOB)
    assert store.claim([id], "second").job == JOB


def test_one_flipped_digit_of_a_result_is_damage(store):
    id = store.add(JOB)
    store.claim([id], "first").finish({"quality": 0.5})
    path = store.path / "done" / f"{id}.json"
    path.write_text(path.read_text().replace("0.5", "0.6"))
    assert store.result(JOB) is None
