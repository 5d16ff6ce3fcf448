"""Whether another launcher than torchrun has started this process as one of several, and its place among them.

srun, mpirun and their like start a process for each rank, and tell each its place in variables of their own. `adopt`
gives these the names that torch reads. Nothing here imports torch.
"""

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STORE_VARIABLE = "TPFORMER_STORE"  # the file by which ranks of run_ranks find one another
REMEDY = "start the ranks with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each"
# what differs from one job to the next, and is equal in all processes of one
JOBS = (
    "SLURM_JOB_ID SLURM_STEP_ID PMIX_NAMESPACE OMPI_MCA_ess_base_jobid OMPI_MCA_orte_ess_jobid PALS_APID FLUX_JOB_ID "
    "LSB_JOBID PBS_JOBID COBALT_JOBID JOB_ID"
).split()


class JoinError(ConnectionError):
    """The ranks of a job cannot find one another. What it says is the user's to mend."""


class Launcher(NamedTuple):
    """The names of a launcher's variables; of several in one text the first that is set counts."""

    name: str
    rank: str
    size: str = ""
    local_rank: str = ""
    local_size: str = ""


# A launcher stands above those that may have started its daemons, because its processes inherit their variables.
LAUNCHERS = (
    Launcher("horovodrun", *(f"HOROVOD_{key}" for key in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    Launcher("mpirun", *(f"OMPI_COMM_WORLD_{key}" for key in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    Launcher("mpirun_rsh", *(f"MV2_COMM_WORLD_{key}" for key in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    Launcher("jsrun", *(f"JSM_NAMESPACE_{key}" for key in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    Launcher(  # of MPICH, Intel MPI and PALS
        "mpiexec",
        "PMI_RANK PALS_RANKID",
        "PMI_SIZE",
        "MPI_LOCALRANKID PMI_LOCAL_RANK PALS_LOCAL_RANKID",
        "MPI_LOCALNRANKS PMI_LOCAL_SIZE PALS_LOCAL_SIZE",
    ),
    Launcher("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS SLURM_NTASKS SLURM_NPROCS", "SLURM_LOCALID"),
    Launcher("prun", "PMIX_RANK"),
    Launcher("aprun", "ALPS_APP_PE"),
)


class LaunchedRank(NamedTuple):
    """The place of this process among others, as a launcher says it. None: it does not say."""

    launcher: Launcher
    rank: int
    size: int | None
    local_rank: int | None
    local_size: int | None


def launched() -> bool:
    """Whether this process is already a rank, started by torchrun, by run_ranks or with the same variables."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def adopt() -> None:
    """If another launcher has started this process as one of several, set torchrun's variables to what it says.

    Those that are set already stay. A process that is alone, or the script of a SLURM batch job, stays as it is.
    ValueError, with the remedy, for a place among the ranks that is known in part, or that no rank can have.
    """
    os.environ.update(translated(os.environ))


def translated(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that `adopt` sets in this environment. Errors: those of adopt."""
    if STORE_VARIABLE in environment:
        return {}
    given = {name: environment[name] for name in TORCH if name in environment}
    half = [name for name in ("RANK", "WORLD_SIZE") if name in given]
    if len(half) == 2:
        _check(given, environment)
        return {}
    place = _place(environment)
    if place is None or (place.size == 1 and not half):
        if half:
            other = "WORLD_SIZE" if half == ["RANK"] else "RANK"
            raise ValueError(f"the environment has {half[0]} without {other}: {REMEDY}, or unset {half[0]}")
        return {}
    own = _own(place)
    for name in given.keys() & own.keys():
        if given[name] != own[name]:
            raise ValueError(
                f"{name} is {given[name]}, and {place.launcher.name} says {own[name]}: unset {name}, or {REMEDY}"
            )
    own |= _meeting(place, environment) | given
    _check(own, environment)
    return own


def _own(place: LaunchedRank) -> dict[str, str]:
    """The place in torchrun's variables. ValueError if it is known in part."""
    missing = [what for what, value in (("how many there are", place.size), ("its local rank", place.local_rank))
               if value is None]  # fmt: skip
    if missing:
        raise ValueError(
            f"{place.launcher.name} has started this process as rank {place.rank}, and does not say "
            f"{' and '.join(missing)}: {REMEDY}"
        )
    own = {"RANK": place.rank, "WORLD_SIZE": place.size, "LOCAL_RANK": place.local_rank}
    own |= {} if place.local_size is None else {"LOCAL_WORLD_SIZE": place.local_size}
    return {name: str(value) for name, value in own.items()}


def _meeting(place: LaunchedRank, environment: Mapping[str, str]) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT: where the ranks meet. ValueError if nothing says where rank 0 is."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    master = "127.0.0.1" if place.local_size == place.size else None
    if master is None and place.launcher.name == "srun" and nodes:
        master = first_node(nodes)
    if master is None and "MASTER_ADDR" not in environment:
        raise ValueError(
            f"{place.launcher.name} has started {place.size} ranks, and does not say on which machine rank 0 is: set "
            f"MASTER_ADDR to that machine and MASTER_PORT to a free port of it, for all ranks"
        )
    job = " ".join(environment.get(name, "") for name in JOBS)
    return {"MASTER_ADDR": master or "", "MASTER_PORT": str(20000 + zlib.crc32(job.encode()) % 10000)}


def _check(values: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """ValueError for values of torch's variables that no rank can have."""
    numbers = {name: values[name] for name in TORCH if name in values and name != "MASTER_ADDR"}
    for name, value in numbers.items():
        if not value.isdecimal():
            raise ValueError(f"{name} is {value!r}, and has to be a whole number: {REMEDY}")
    if not 0 < int(numbers.get("MASTER_PORT", "1")) < 2**16:
        raise ValueError(f"MASTER_PORT is {numbers['MASTER_PORT']}: ports are 1 to 65535")
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if {rank, size} <= numbers.keys() and int(numbers[rank]) >= int(numbers[size]):
            raise ValueError(f"{rank} is {numbers[rank]}, and {size} is {numbers[size]}: ranks count from 0; {REMEDY}")
    of_pod = environment.get("PET_NPROC_PER_NODE", "1")  # what Kubernetes' PyTorchJob sets for torchrun
    if of_pod.isdecimal() and int(of_pod) > 1 and "LOCAL_RANK" not in values:
        raise ValueError(
            f"RANK {values['RANK']} is that of a pod, which is to have {of_pod} ranks (PET_NPROC_PER_NODE): start them "
            f"in each pod with torchrun, which reads the same variables"
        )


def _place(environment: Mapping[str, str]) -> LaunchedRank | None:
    """The place of this process, by the first launcher that says all of it; None if none has started it.

    Another one that says less may be the nearer one. If it names another rank, it is believed, and so refused.
    """
    places = list(_places(environment))
    whole = [place for place in places if place.size is not None and place.local_rank is not None]
    partly = [place for place in places if place not in whole and (not whole or place.rank != whole[0].rank)]
    return next(iter(partly or whole), None)


def _places(environment: Mapping[str, str]) -> Iterator[LaunchedRank]:
    for launcher in LAUNCHERS:
        rank = _number(environment, launcher.rank)
        if rank is None or (launcher.name == "srun" and _is_batch_script(environment)):
            continue
        size, local_rank, local_size = (_number(environment, names) for names in launcher[2:])
        if launcher.name == "srun" and size is not None:
            local_size = _tasks_of_node(environment, size)
        yield LaunchedRank(launcher, rank, size, local_rank, local_size)


def _number(environment: Mapping[str, str], names: str) -> int | None:
    """The first of these variables that holds a number."""
    return next((int(value) for name in names.split() if (value := environment.get(name, "")).isdecimal()), None)


def _is_batch_script(environment: Mapping[str, str]) -> bool:
    """Whether this is the script of a SLURM batch job, which has the variables of the task 0 that it may start."""
    started = {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} & environment.keys()
    return environment.get("ENVIRONMENT") == "BATCH" and not started


def _tasks_of_node(environment: Mapping[str, str], size: int) -> int | None:
    """The tasks of srun on this node: entry SLURM_NODEID of a list such as 8(x2),4."""
    if _number(environment, "SLURM_STEP_NUM_NODES SLURM_NNODES SLURM_JOB_NUM_NODES") == 1:
        return size
    listed = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or ""
    counts = [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed) for _ in range(int(times or 1))]
    node = _number(environment, "SLURM_NODEID")
    return counts[node] if node is not None and node < len(counts) else None


def first_node(nodes: str) -> str:
    """The first name of SLURM's compressed list of nodes, such as node-01 of node-[01-04,7],other."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else nodes)
