"""Manifests for Kubernetes and SkyPilot: only known fields, restarts, and torchrun's variables."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from paths import HELPERS, RECIPES, ROOT

from colograd.config.parse import planned_settings
from colograd.runtime import process

KUBERNETES = RECIPES / "kubernetes"
JOBSET, TRAINJOB = KUBERNETES / "jobset.yaml", KUBERNETES / "trainjob.yaml"
SKYPILOT = RECIPES / "skypilot" / "colograd.yaml"
MODELS = {"JobSet": "JobsetV1alpha2JobSet", "TrainJob": "TrainerV1alpha1TrainJob",
          "TrainingRuntime": "TrainerV1alpha1TrainingRuntime"}  # fmt: skip
# Fields of SkyPilot 0.14.1, sky/utils/schemas.py: get_task_schema, get_resources_schema, get_storage_schema.
SKY_TASK = {"name", "workdir", "num_nodes", "resources", "file_mounts", "setup", "run", "envs", "secrets", "volumes",
            "config"}  # fmt: skip
SKY_RESOURCES = {"infra", "accelerators", "cpus", "memory", "disk_size", "image_id", "use_spot", "job_recovery"}
SKY_RECOVERY = {"strategy", "max_restarts_on_errors", "recover_on_exit_codes"}
SKY_STORAGE = {"name", "source", "store", "mode", "persistent"}
# https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html
SKY_VARIABLES = {"SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_GPUS_PER_NODE", "SKYPILOT_NODE_IPS"}


def documents(path: Path) -> list[dict[str, Any]]:
    return [*yaml.safe_load_all(path.read_text())]


@pytest.mark.parametrize("path", [JOBSET, TRAINJOB], ids=lambda path: path.stem)
def test_manifest_has_known_fields_only(path: Path) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for document in documents(path):
        model = getattr(models, MODELS[document["kind"]])
        assert model.from_dict(document).to_dict() == document, "a field is unknown, or has another type"


def node_job(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JobSet's spec and its job's."""
    spec = documents(path)[0]["spec"]
    spec = spec.get("template", {}).get("spec", spec)
    (job,) = spec["replicatedJobs"]
    return spec, job["template"]["spec"]


@pytest.mark.parametrize("path", [JOBSET, TRAINJOB], ids=lambda path: path.stem)
def test_manifest_restarts_stopped_pods(path: Path) -> None:
    jobset, job = node_job(path)
    rules = [
        {key: value for key, value in rule.items() if key != "action"} for rule in job["podFailurePolicy"]["rules"]
    ]
    assert {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]} in rules
    assert {"onExitCodes": {"containerName": "node", "operator": "In", "values": [143]}} in rules
    assert {rule["action"] for rule in job["podFailurePolicy"]["rules"]} == {"FailJob"} and job["backoffLimit"] == 0
    (rule,) = jobset["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert job["template"]["spec"]["restartPolicy"] == "Never", "Kubernetes wants it for a podFailurePolicy"


@pytest.mark.parametrize("path", [JOBSET, TRAINJOB], ids=lambda path: path.stem)
def test_manifest_has_shared_memory_and_grace(path: Path) -> None:
    pod = node_job(path)[1]["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory" and "persistentVolumeClaim" in mounts["/runs"]
    trainer = documents(path)[-1]["spec"].get("trainer", container)
    variables = {variable["name"]: variable.get("value") for variable in trainer["env"]}
    assert int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) >= pod["terminationGracePeriodSeconds"] >= 600


@pytest.mark.parametrize("path", [JOBSET, TRAINJOB], ids=lambda path: path.stem)
def test_manifest_starts_a_resuming_run(path: Path) -> None:
    started = documents(path)[-1]["spec"].get("trainer") or node_job(path)[1]["template"]["spec"]["containers"][0]
    assert started["command"] == ["torchrun"] and started["args"][:2] == ["-m", "colograd.train"]
    settings = planned_settings(started["args"][2:])
    assert settings["resume_from_checkpoint"] == "auto" and settings["output_dir"].startswith("/runs/")


def test_jobset_names_its_first_pod() -> None:
    """Kubernetes names pods JOBSET-REPLICATED_JOB-JOB-POD, in a subdomain with the JobSet's name."""
    name, (jobset, job) = documents(JOBSET)[0]["metadata"]["name"], node_job(JOBSET)
    variables = {each["name"]: each.get("value") for each in job["template"]["spec"]["containers"][0]["env"]}
    assert jobset["network"]["enableDNSHostnames"] and job["completionMode"] == "Indexed"
    assert variables["PET_MASTER_ADDR"] == f"{name}-{jobset['replicatedJobs'][0]['name']}-0-0.{name}"
    assert variables["PET_NNODES"] == str(job["completions"]) == str(job["parallelism"])


def test_skypilot_job_has_known_fields_only() -> None:
    (task,) = documents(SKYPILOT)
    (storage,) = task["file_mounts"].values()
    assert set(task) <= SKY_TASK and set(task["resources"]) <= SKY_RESOURCES and set(storage) <= SKY_STORAGE
    assert set(task["resources"]["job_recovery"]) <= SKY_RECOVERY
    assert all(isinstance(value, str) for value in task["envs"].values())
    assert set(re.findall(r"\$(SKYPILOT_\w+)", task["run"])) <= SKY_VARIABLES


def test_skypilot_job_resumes_after_143() -> None:
    (task,) = documents(SKYPILOT)
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [143]
    words = shlex.split(task["run"].replace("\\\n", " "))
    settings = planned_settings(words[words.index("colograd.train") + 1 :])
    assert settings["resume_from_checkpoint"] == "auto"
    assert any(settings["output_dir"].startswith(f"{mount}/") for mount in task["file_mounts"])


@pytest.mark.slow
@pytest.mark.engine
def test_torchrun_reads_the_variables_of_kubeflow(tiny_model: Path, tmp_path: Path) -> None:
    """Names as in the JobSet; Kubeflow Trainer sets the same five."""
    container = node_job(JOBSET)[1]["template"]["spec"]["containers"][0]
    names = {variable["name"] for variable in container["env"] if variable["name"].startswith("PET_")}
    values = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "127.0.0.1",
              "PET_MASTER_PORT": str(process.free_port())}  # fmt: skip
    assert names == set(values)
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(tiny.recipe(tiny_model, save_strategy="no", report_to="none")))
    done = subprocess.run(
        [Path(sys.executable).with_name("torchrun"), "-m", "colograd.train", "--config", recipe, "--output_dir",
         tmp_path / "run"],
        cwd=HELPERS, env=tiny.clean_environment() | values | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=tiny.PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    assert "2 ranks" in done.stdout + done.stderr
    assert (tmp_path / "run" / "trainer_state.json").exists()
