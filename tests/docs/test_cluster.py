"""The files for Slurm and Kubernetes start what they say, as far as that shows without a cluster."""

import os
import subprocess

import pytest
import yaml
from torch.distributed.run import parse_args as torchrun

from common import ladder

FOLDER = ladder.ROOT / "02_ddp_raw" / "cluster"
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NODELIST": "node[7-8]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_CPUS_PER_TASK": "16",
    "SLURM_GPUS_ON_NODE": "2",
}
# There are so many nodes that a program which reads the first line only would end scontrol by a signal.
PROGRAMS = {"scontrol": "printf 'node%s\\n' {7..20000}", "srun": 'printf "%s\\n" "$@"'}


def started_by_srun(folder, *flags: str) -> list[str]:
    """The words that the job gives to srun, in a folder with a virtual environment and programs in place of Slurm's."""
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").write_text("activated=yes\n")
    for name, body in PROGRAMS.items():
        program = folder / name
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)
    environment = os.environ | SLURM | {"SLURM_SUBMIT_DIR": str(folder), "PATH": f"{folder}:{os.environ['PATH']}"}
    job = ["bash", str(FOLDER / "job.sbatch"), *flags]
    done = subprocess.run(job, cwd="/", env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("flags", [[], ["03_accelerate/train_full.py", "--checkpoint-dir", "checkpoints"]])
def test_the_slurm_job_starts_torchrun(flags, tmp_path):
    cpus, number, program, *words = started_by_srun(tmp_path, *flags)
    assert [cpus, number] == ["--cpus-per-task", "16"]
    assert program == "torchrun"
    options = torchrun(words)
    assert (options.nnodes, options.nproc_per_node, options.rdzv_id) == ("2", "2", "1234567")
    host, port = options.rdzv_endpoint.split(":")
    assert host == "node7"
    assert port == str(20000 + 1234567 % 10000)
    script, *rest = flags or ["02_ddp_raw/train.py"]
    assert (options.training_script, options.training_script_args) == (script, rest)
    assert (ladder.ROOT / script).exists()


@pytest.fixture
def documents() -> dict[str, dict]:
    return {document["kind"]: document for document in yaml.safe_load_all((FOLDER / "job.yaml").read_text())}


def test_the_pytorch_job_starts_what_torchrun_understands(documents, monkeypatch):
    """The operator sets PET_ variables on each pod; torchrun takes its options from them."""
    spec = documents["PyTorchJob"]["spec"]
    replicas = spec["pytorchReplicaSpecs"]
    assert list(replicas) == ["Master", "Worker"]
    assert documents["PyTorchJob"]["apiVersion"] == "kubeflow.org/v1"
    nodes = sum(replica["replicas"] for replica in replicas.values())
    given = {"NNODES": str(nodes), "NPROC_PER_NODE": spec["nprocPerNode"], "NODE_RANK": "1", "MASTER_ADDR": "ladder-0"}
    for key, value in given.items():
        monkeypatch.setenv(f"PET_{key}", value)
    for replica in replicas.values():
        (container,) = replica["template"]["spec"]["containers"]
        program, *words = container["command"]
        options = torchrun(words)
        assert program == "torchrun"
        assert (options.nnodes, options.nproc_per_node, options.node_rank) == ("2", "2", 1)
        assert (ladder.ROOT / options.training_script).exists()
        assert container["resources"]["limits"]["nvidia.com/gpu"] == int(spec["nprocPerNode"])


def test_the_pytorch_job_has_shared_memory_and_keeps_its_checkpoints(documents):
    pod = documents["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounted["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    claim = volumes[mounted["/checkpoints"]]["persistentVolumeClaim"]["claimName"]
    assert claim == documents["PersistentVolumeClaim"]["metadata"]["name"]
    assert container["command"][-1].startswith("/checkpoints/")
