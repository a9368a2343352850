"""The launcher's configuration file: what accelerate writes works or is refused by name, and nothing else happens."""

import dataclasses
import io
from pathlib import Path

import pytest
import yaml

from common.accelerator.commands.accelerate_cli import main
from common.accelerator.commands.config.config_args import (
    ClusterConfig,
    ConfigError,
    default_config_path,
    load_config_from_file,
)
from tests.peers import import_or_skip


def load(folder: Path, text: str) -> ClusterConfig:
    path = folder / "config.yaml"
    path.write_text(text)
    return load_config_from_file(path)


def test_a_file_of_accelerates_means_the_same_here(tmp_path):
    theirs = import_or_skip("accelerate.commands.config.config_args")
    path = tmp_path / "default_config.yaml"
    kind = {"distributed_type": "MULTI_CPU", "mixed_precision": "bf16", "use_cpu": True, "debug": False}
    nodes = {"num_processes": 4, "num_machines": 2, "machine_rank": 1}
    rendezvous = {"main_process_ip": "10.0.0.1", "main_process_port": 29501, "rdzv_backend": "c10d"}
    config = theirs.ClusterConfig(compute_environment="LOCAL_MACHINE", **kind, **nodes, **rendezvous)
    config.to_yaml_file(str(path))
    ours = load_config_from_file(path)
    ours.to_yaml_file(path)
    again = theirs.load_config_from_file(str(path))
    for field in dataclasses.fields(ours):
        if field.name not in ("gpu_ids", "fsdp_config"):  # they may be None there
            value = getattr(config, field.name)
            assert getattr(ours, field.name) == getattr(again, field.name) == value, field.name


def test_out_of_scope_is_refused_by_name_and_passes_when_empty(tmp_path):
    for nothing in (None, {}, [], "", False, "no"):
        assert load(tmp_path, yaml.safe_dump({"deepspeed_config": nothing})) == ClusterConfig()
    for request in ({"zero_stage": 2}, ["x"], "yes", True):
        with pytest.raises(ConfigError, match="deepspeed_config is out of scope"):
            load(tmp_path, yaml.safe_dump({"deepspeed_config": request}))


@pytest.mark.parametrize(
    "text, message",
    [
        ("num_proceses: 2", "unknown key 'num_proceses'"),
        ("num_processes: two", "num_processes must be a whole number, not 'two'"),
        ("{num_processes: 3, num_machines: 2, main_process_ip: h, main_process_port: 1}", "is not divisible"),
        ("{num_processes: 2, num_machines: 2}", "need main_process_ip and main_process_port"),
        ("distributed_type: DEEPSPEED", "distributed_type 'DEEPSPEED' is not supported"),
        ("{distributed_type: FSDP, fsdp_config: {fsdp_verison: 2}}", "'fsdp_verison' in fsdp_config; version 2 has "),
        ("{distributed_type: 'NO', num_processes: 2}", "NO is one process, but num_processes is 2"),
        ("{distributed_type: MULTI_GPU, use_cpu: true}", "use_cpu contradicts distributed_type MULTI_GPU"),
        ("gpu_ids: [0, 1]", "gpu_ids must be a text, not [0, 1]"),
        ("use_cpu: perhaps", "use_cpu must be true or false, not 'perhaps'"),
        ("compute_environment: AMAZON_SAGEMAKER", "out of scope: 'AMAZON_SAGEMAKER'"),
        ("", "holds None, not a mapping"),
        ("a: [", "line 1, column 5"),
        ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
    ],
)
def test_a_config_file_that_is_wrong_is_named_in_one_line(tmp_path, text, message):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    assert str(error.value).startswith(str(tmp_path / "config.yaml")) and message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_default_file_lies_where_accelerate_keeps_it(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/nowhere")
    assert default_config_path() == Path("/nowhere/.cache/huggingface/accelerate/default_config.yaml")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_config_path() == Path("/cache/huggingface/accelerate/default_config.yaml")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert default_config_path() == tmp_path / "accelerate" / "default_config.yaml"
    assert load_config_from_file() == ClusterConfig()
    default_config_path().parent.mkdir()
    default_config_path().write_text("num_processes: 3")
    assert load_config_from_file().num_processes == 3


def test_config_default_writes_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    elsewhere = tmp_path / "elsewhere.yaml"
    assert main(["config", "--config_file", str(elsewhere), "default"]) == 0
    assert elsewhere.exists() and not default_config_path().exists()
    assert main(["config", "default", "--mixed_precision", "bf16"]) == 0
    assert str(default_config_path()) in capsys.readouterr().out
    assert main(["config", "default"]) == 1
    assert "left as it is" in capsys.readouterr().err
    assert load_config_from_file().mixed_precision == "bf16"


def test_config_asks_until_the_answers_fit(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "file.yaml"
    answers = iter(["abacus", "yes", "x", "0", "-1", "4", "half", "bf16"])
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    assert main(["config", "--config_file", str(path)]) == 0
    asked_for = ClusterConfig(distributed_type="MULTI_CPU", num_processes=4, mixed_precision="bf16", use_cpu=True)
    assert load_config_from_file(path) == asked_for


def test_config_without_answers_or_a_place_to_write_is_one_clear_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n"))
    assert main(["config", "--config_file", str(tmp_path / "file.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "config default" in error
    (tmp_path / "file").write_text("")
    assert main(["config", "default", "--config_file", str(tmp_path / "file" / "x.yaml")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_env_reports_a_broken_configuration(tmp_path, capsys, monkeypatch):
    path = tmp_path / "config.yaml"
    path.write_text("num_proceses: 2")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert main(["env", "--config_file", str(path)]) == 0
    out = capsys.readouterr().out
    assert "PyTorch" in out and "ACCELERATE_MIXED_PRECISION=bf16" in out
    assert "unknown key 'num_proceses'" in out
