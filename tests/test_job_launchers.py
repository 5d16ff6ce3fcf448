"""Other launchers than torchrun: processes with their variables join as ranks, or one sentence says what is missing."""

import pytest

from tpformer.launchers import LAUNCHERS, first_node, translated

HERE = {"MASTER_ADDR": "127.0.0.1"}
TWO = {"rank": 1, "size": 2, "local_rank": 1, "local_size": 2}
SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "1", "SLURM_NODEID": "2"}
NODES = {"SLURM_JOB_NODELIST": "gpu-[07-08,11],login", "SLURM_TASKS_PER_NODE": "2(x2),2", "SLURM_NNODES": "3"}


def of(launcher: str, **own: object) -> dict[str, str]:
    """The environment of a launcher's process, with the first name of each of its variables."""
    names = next(each for each in LAUNCHERS if each.name == launcher)
    return {getattr(names, key).split()[0]: str(value) for key, value in own.items()}


@pytest.mark.parametrize("launcher", [each.name for each in LAUNCHERS if each.local_size])
def test_a_process_of_a_launcher_has_torchruns_variables_and_daemons_of_another_do_not_count(launcher):
    """A launcher may start its daemons by srun, whose variables its processes have, too: those of one task a node."""
    daemon = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_NNODES": "1"}
    found = translated(of(launcher, **TWO) | daemon)
    port = found.pop("MASTER_PORT")
    assert found == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"} | HERE
    assert translated(of(launcher, **TWO) | {"PMIX_NAMESPACE": "another job"})["MASTER_PORT"] != port
    assert translated(of(launcher, rank=0, size=1, local_rank=0, local_size=1)) == {}, "one process is no rank"
    far = of(launcher, **TWO | {"size": 4})
    assert translated(far | HERE | {"MASTER_PORT": "1234"})["WORLD_SIZE"] == "4"
    with pytest.raises(ValueError, match=f"^{launcher} has started 4 ranks, .*: set MASTER_ADDR"):
        translated(far)


@pytest.mark.parametrize(("environment", "found"), [
    (SRUN | NODES, "5 6 1 2 gpu-07"),
    (SRUN | NODES | {"SLURM_STEP_NODELIST": "a1,b2", "SLURM_STEP_TASKS_PER_NODE": "1,3,4"}, "5 6 1 4 a1"),
    (SRUN | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "1"}, "5 8 1 8 127.0.0.1"),
    (SRUN | NODES | {"PMI_RANK": "5", "PMI_SIZE": "6", "PMIX_RANK": "5"}, "5 6 1 2 gpu-07"),  # srun --mpi=pmi2
    (SRUN | NODES | {"WORLD_SIZE": "6"}, "5 6 1 2 gpu-07"),
    (SRUN | {"ENVIRONMENT": "BATCH", "SLURM_PROCID": "0"}, None),  # the script itself
    ({"SLURM_NTASKS": "6", "SLURM_JOB_ID": "1"}, None),  # salloc's shell
    (SRUN | {"RANK": "0", "WORLD_SIZE": "2"}, None),  # torchrun in a task of srun
    ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}, None),  # PyTorchJob
])  # fmt: skip
def test_where_srun_and_torchrun_put_a_rank(environment, found):
    values = translated(environment)
    keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert (" ".join((values | environment)[key] for key in keys) if values else None) == found


@pytest.mark.parametrize(("environment", "said"), [
    ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "mpiexec has started this process as rank 0, and does not say its local rank"),
    ({"ALPS_APP_PE": "3"}, "aprun has started this process as rank 3, and does not say how many there are"),
    ({"PMIX_RANK": "1", **SRUN, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, "prun has started"),
    ({"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}, "srun has started this process as rank 1, and does not say how many"),
    ({"WORLD_SIZE": "4"}, "the environment has WORLD_SIZE without RANK"),
    ({"RANK": "1"}, "the environment has RANK without WORLD_SIZE"),
    (SRUN | NODES | {"RANK": "2"}, "RANK is 2, and srun says 5: unset RANK"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2, and WORLD_SIZE is 2: ranks count from 0"),
    ({"RANK": "", "WORLD_SIZE": "2"}, "RANK is '', and has to be a whole number"),
    ({"RANK": "1", "WORLD_SIZE": "8", "PET_NPROC_PER_NODE": "4"}, "RANK 1 is that of a pod, which is to have 4 ranks"),
])  # fmt: skip
def test_a_place_that_is_known_in_part_or_cannot_be_is_one_sentence(environment, said):
    with pytest.raises(ValueError) as error:
        translated(environment)
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_the_first_name_of_a_list_of_nodes():
    for nodes, first in (("n1", "n1"), ("n1,n2", "n1"), ("r[3,5]c[01-04]-x,y", "r3c01-x"), ("gpu[9-12]", "gpu9")):
        assert first_node(nodes) == first
