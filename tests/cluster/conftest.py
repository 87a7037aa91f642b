"""A cluster of two nodes, and the adapter of a run that nothing happened to."""

import pytest

from tests.support.jobs import Job, adapter, for_users
from tests.support.slurm import slurm
from tests.support.training import outcome


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm") / "cluster", num_nodes=2, limits=False) as cluster:
        for_users(cluster)
        yield cluster


@pytest.fixture(scope="session")
def undisturbed_run(cluster, tmp_path_factory):
    job = Job(cluster, tmp_path_factory.mktemp("undisturbed"), "tiny_cpu.sh")
    assert job.wait()["JobState"] == "COMPLETED", job.text
    assert outcome(job.run_dir)["status"] == "done"
    assert "on 2 nodes" in job.text
    return job.run_dir


@pytest.fixture(scope="session")
def undisturbed(undisturbed_run):
    return adapter(undisturbed_run)
